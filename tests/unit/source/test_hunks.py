"""hooks.patch: what counts as a thin edit of vendored text files, and applying it without git."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from upstream import SOURCE, Upstream, blob, diff_of

from flashnext.build import hunks
from flashnext.errors import HooksInvalidError

OLD = SOURCE["common/arg.cpp"]
NEW = OLD.replace("int arg_10 = 10;\n", "int arg_10 = 10;\nfn_a();\n")
GOOD = "From: f <f@localhost>\nSubject: [PATCH] a: long\n words\n\nThe reason,\nin two lines.\n\n" + diff_of(
    "common/arg.cpp", OLD, NEW
)


def parse(folder: Path, text: str) -> hunks.HooksPatch:
    file = folder / "hooks.patch"
    file.write_text(text, newline="")
    return hunks.read_hooks(file)


def test_a_whole_patch(tmp_path: Path) -> None:
    patch = parse(tmp_path, GOOD + "-- \n2.39.5\n")
    assert patch.headers == {"from": "f <f@localhost>", "subject": "[PATCH] a: long words"}
    assert patch.body == "The reason,\nin two lines."
    assert (patch.added, patch.removed) == (1, 0)
    (edit,) = patch.edits
    assert (edit.path, edit.old_blob, edit.new_blob) == ("common/arg.cpp", blob(OLD), blob(NEW))
    (hunk,) = edit.hunks
    assert (hunk.old_start, hunk.end_context(), hunk.inner_context()) == (8, 3, 3)


def test_format_patch_of_git_itself(tmp_path: Path) -> None:
    """The mbox line, the stat between --- and the diff, and the version at the end."""
    mail, diff = GOOD.split("diff --git", 1)
    stat = "---\n common/arg.cpp | 1 +\n 1 file changed\n\n"
    text = f"From 0123 Mon Sep 17 00:00:00 2001\n{mail}{stat}diff --git{diff}--\n2.39\n"
    assert parse(tmp_path, text).body == "The reason,\nin two lines."


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("index ", "new file mode 100644\nindex ", "hooks only edit text files"),
        ("index ", "deleted file mode 100644\nindex ", "hooks only edit text files"),
        ("index ", "old mode 100644\nnew mode 100755\nindex ", "hooks only edit text files"),
        (blob(OLD), "0" * 40, "neither make nor delete"),
        ("b/common/arg.cpp\nindex", "b/common/else.cpp\nindex", "not the edit of one plainly named file"),
        ("common/arg.cpp", "../arg.cpp", "leads out of the tree"),
        ("--- a/common/arg.cpp", "--- /dev/null", "expected '--- a/common/arg.cpp'"),
        ("@@ -8,6 +8,7 @@", "@@ -8,6 +8,9 @@", "ends too early"),
        ("@@ -8,6 +8,7 @@", "@@ -8,5 +8,6 @@", "more lines than its header says"),
        ("@@ -8,6 +8,7 @@", "@@ eight @@", "not a hunk header"),
    ],
)
def test_what_is_no_plain_edit(tmp_path: Path, old: str, new: str, said: str) -> None:
    assert old in GOOD
    with pytest.raises(HooksInvalidError) as caught:
        parse(tmp_path, GOOD.replace(old, new))
    assert said in caught.value.context[0]
    assert caught.value.context[0].startswith(f"{tmp_path / 'hooks.patch'}:")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "no edit in it"),
        ("Subject: x\n\nonly words\n", "no edit in it"),
        (GOOD + diff_of("common/arg.cpp", OLD, NEW), "edited twice"),
        (GOOD + "junk\n", "expected `diff --git`"),
        (GOOD.split("@@")[0], "no hunk"),
    ],
)
def test_incomplete_patches(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(HooksInvalidError) as caught:
        parse(tmp_path, text)
    assert said in caught.value.context[0]


def test_mismatch_names_hunk_and_line(tmp_path: Path) -> None:
    (edit,) = parse(tmp_path, GOOD).edits
    with pytest.raises(hunks.HunkMismatch) as caught:
        hunks.apply_edit(OLD.replace("int arg_9 = 9;", "int arg_9 = 0;").encode(), edit)
    assert caught.value.hunk.number == 1
    assert caught.value.detail == "line 9: expected 'int arg_9 = 9;', found 'int arg_9 = 0;'"
    with pytest.raises(hunks.HunkMismatch):
        hunks.apply_edit(b"", edit)


LINES = st.lists(st.sampled_from(["a\n", "b\n", "c\n", "\n", "{\n", "é\n", "x\r\n", "\f\n"]), max_size=40)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(old=LINES, new=LINES)
def test_any_diff_applies_to_what_it_was_made_from(tmp_path: Path, old: list[str], new: list[str]) -> None:
    before, after = "".join(old), "".join(new)
    if before == after:
        return
    (edit,) = parse(tmp_path, diff_of_bytes("f", before, after)).edits
    assert hunks.apply_edit(before.encode(), edit).decode() == after
    assert hunks.blob_id(after.encode()) == edit.new_blob


def diff_of_bytes(path: str, old: str, new: str) -> str:
    """As diff_of, for texts whose lines hold other line separators than a newline."""
    import difflib

    lines = difflib.unified_diff(
        [part + "\n" for part in old.split("\n")[:-1]], [part + "\n" for part in new.split("\n")[:-1]], n=3
    )
    body = "".join(list(lines)[2:])
    head = (
        f"diff --git a/{path} b/{path}\nindex {blob(old)}..{blob(new)} 100644\n--- a/{path}\n+++ b/{path}\n"
    )
    return head + body


def test_no_newline_at_the_end(tmp_path: Path) -> None:
    text = (
        f"diff --git a/f b/f\nindex {blob('a')}..{blob('b')} 100644\n--- a/f\n+++ b/f\n"
        "@@ -1 +1 @@\n-a\n\\ No newline at end of file\n+b\n\\ No newline at end of file\n"
    )
    (edit,) = parse(tmp_path, text).edits
    assert hunks.apply_edit(b"a", edit) == b"b"


def test_real_features_are_read(upstream: Upstream) -> None:
    upstream.feature("first", {"common/arg.cpp": ("int arg_10 = 10;\n", "fn_a();\n")})
    patch = hunks.read_hooks(upstream.patches / "first/hooks.patch")
    assert (patch.added, patch.removed) == (1, 1)

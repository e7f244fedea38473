"""Profiles: every problem at once with file and line, exit code 3, an id and a hint; never a traceback."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from flashnext.errors import FlashnextError, ProfileError, ProfileInvalidError, ProfileNotQualifiedError
from flashnext.profile import load
from flashnext.profile.schema import Profile, differences, json_schema

DEMO = load.find("demo").read_text()
QUALIFIED = load.find("2x3090").read_text()


def edited(text: str, old: str, new: str) -> str:
    assert text.count(old) == 1, (old, text.count(old))
    return text.replace(old, new)


def refusal(text: str, tmp_path: Path) -> FlashnextError:
    file = tmp_path / "p.yaml"
    file.write_text(text)
    with pytest.raises(ProfileError) as caught:
        load.load(str(file))
    return caught.value


def line_of(text: str, part: str) -> int:
    return next(n for n, line in enumerate(text.splitlines(), 1) if part in line)


@pytest.mark.parametrize("name", ["demo", "demo-full", "demo-lean", "2x3090"])
def test_shipped_profiles_are_sound(name: str) -> None:
    loaded = load.load(name)
    assert loaded.profile.name == name
    assert loaded.deviations == ()


@pytest.mark.parametrize(
    ("old", "new", "marker", "words"),
    [
        ("  micro_batch: 512", "  micro_bacth: 512", "micro_bacth", "did you mean `micro_batch`?"),
        ("  micro_batch: 512", "  ubatch_size: 512", "ubatch_size", "write context.micro_batch"),
        ("  micro_batch: 512", "  micro_batch: 2k", "2k", "valid integer, found '2k'"),
        ("  micro_batch: 512", '  micro_batch: "512"', '"512"', "valid integer, found '512'"),
        ("  micro_batch: 512", "  micro_batch: -1", "-1", "greater than or equal to 1"),
        ("  micro_batch: 512", "  micro_batch: 512.0", "512.0", "valid integer"),
        ("  micro_batch: 512", "  micro_batch: true", "true", "valid integer, found true"),
        ("  micro_batch: 512", "  micro_batch: 8192", "micro_batch: 8192", "above context.batch (4096)"),
        ("  size: 8192", "  size: 8000", "8000", "no multiple of 256"),
        ("  sequences: 1", "  sequences: 0", "sequences: 0", "greater than or equal to 1"),
        ("  count: 2", "  count: 2\n  slots: 3", "slots: 3", "no such key"),
        ("  kind: virtual", "  kind: vulkan", "vulkan", "'virtual' or 'cuda'"),
        ("  memory_mib: 2048", "  usable_mib: 2048", "usable_mib", "cuda devices only"),
        ("    memory: host", "    memory: pinned", "memory: pinned", "pinned memory needs cuda devices"),
        (r"(gate|up|down)_exps\.weight'", "(gate|up|down_exps'", "down_exps", "no regular expression"),
        ("  synthetic: demo", "  synthetic: demo\n  mmproj: x.gguf", "mmproj", "text only"),
        ("  synthetic: demo", "  synthetic: demo\n  path: x.gguf", "path", "exactly one of"),
        ("  synthetic: demo", "  hf_repo: a/b", "hf_repo", "never downloads"),
        ("  port: 8080", "  port: 80800", "80800", "less than or equal to 65535"),
        ("  port: 8080", "  sleep_idle_seconds: 60", "sleep_idle", "never unloaded"),
        ("  timeout_s: 3600", "  timeout_s: 60", "timeout_s: 60", "greater than or equal to 3600"),
        ("  alias: flashnext-demo", "  alias: a b", "a b", "should match pattern"),
        ("  alias: flashnext-demo", "  alias: x\n  host: 0.0.0.0", "0.0.0.0", "api_key_file is required"),
        ("  alias: flashnext-demo", "  alias: x\n  host: box.lan", "box.lan", "no IP address"),
        ("kind: demo", "kind: Demo", "Demo", "'demo', 'qualified' or 'experimental'"),
        ("kind: demo", "kind: demo\nlean_prefill: 5", "prefill: 5", "should be a mapping, found 5"),
        ("kind: demo", "kind: demo\nlean_prefill: {chunk: Auto}", "chunk", "integer or 'auto', found 'Auto'"),
        ("kind: demo", "kind: demo\nlean_prefill: {chunk: 8}", "chunk", "or equal to 32 or 'auto', found 8"),
    ],
)
def test_refused_with_line_and_reason(old: str, new: str, marker: str, words: str, tmp_path: Path) -> None:
    text = edited(DEMO, old, new)
    error = refusal(text, tmp_path)
    assert (error.exit_code, error.id) == (3, "profile-invalid")
    assert "profile schema" in error.advice
    hits = [line for line in error.context if words in line]
    assert hits, error.context
    place = int(hits[0].split(":")[1])
    # a rule between several values hangs on their section
    section = line_of(text, "  synthetic") - 1 if marker == "path" else 0
    assert place == section or place == line_of(text, marker), error.context


def test_missing_sections_are_named(tmp_path: Path) -> None:
    error = refusal("name: x\nkind: demo\n", tmp_path)
    for section in ("summary", "model", "devices", "context", "server"):
        assert f"p.yaml: {section}: missing" in error.context


def test_all_problems_at_once_in_order_of_lines(tmp_path: Path) -> None:
    text = edited(DEMO, "  micro_batch: 512", "  micro_batch: on")
    text = edited(text, "  count: 2", "  cuont: 2")
    text = edited(text, "  port: 8080", "  port: 0")
    error = refusal(text, tmp_path)
    keys = [line.split(": ")[1] for line in error.context]
    assert keys == ["devices.count", "devices.cuont", "context.micro_batch", "server.port"]
    assert error.message == "4 problems in p.yaml"


def test_a_value_that_yaml_refused_is_reported_once(tmp_path: Path) -> None:
    error = refusal(edited(DEMO, "  micro_batch: 512", "  micro_batch: 0512"), tmp_path)
    assert len(error.context) == 1


def test_unknown_name_gets_a_guess() -> None:
    with pytest.raises(ProfileError) as caught:
        load.load("demoo")
    assert caught.value.id == "profile-not-found"
    assert "did you mean demo?" in caught.value.context


def test_missing_file() -> None:
    with pytest.raises(ProfileError) as caught:
        load.load("./nowhere.yaml")
    assert (caught.value.id, caught.value.exit_code) == ("profile-not-found", 3)


QUALIFIED_EDITS = [
    ("  size: 261888", "  size: 262144", "context.size", "261,888"),
    ("  micro_batch: 512", "  micro_batch: 1024", "context.micro_batch", "512"),
    ("  batch: 4096", "  batch: 8192", "context.batch", "4,096"),
    ("  kv_type: f16", "  kv_type: q8_0", "context.kv_type", "f16"),
    ("  lazy: false", "  lazy: true", "load.lazy", "false"),
    ("  pin_host: true", "  pin_host: false", "load.pin_host", "true"),
    ("  rotation: false", "  rotation: true", "attention.rotation", "false"),
    ("  slots: 150", "  slots: 188", "expert_cache.slots", "150"),
    ("  depth: 3", "  depth: 4", "mtp.depth", "3"),
    ("  mode: transaction", "  mode: bypass", "phase_prefill.mode", "transaction"),
    ("  min_tokens: 2048", "  min_tokens: 0", "phase_prefill.min_tokens", "2,048"),
    ("  name: RTX 3090", "  name: RTX 4090", "devices.name", "RTX 3090"),
]


@pytest.mark.parametrize(("old", "new", "key", "required"), QUALIFIED_EDITS)
def test_qualified_set_is_required(old: str, new: str, key: str, required: str, tmp_path: Path) -> None:
    text = edited(QUALIFIED, old, new)
    error = refusal(text, tmp_path)
    assert isinstance(error, ProfileNotQualifiedError)
    assert error.exit_code == 3
    assert "kind: experimental" in error.advice
    line = next(line for line in error.context if f": {key}: " in line)
    assert line.startswith(f"p.yaml:{line_of(text, new)}: ")
    assert f"qualified is {required}: " in line
    assert len(line.rpartition("qualified is")[2]) > len(required) + 10, "a reason is given"


def test_every_deviation_is_listed_at_once_and_experimental_shows_them(tmp_path: Path) -> None:
    text = QUALIFIED
    for old, new, *_ in QUALIFIED_EDITS:
        text = edited(text, old, new)
    assert len(refusal(text, tmp_path).context) == len(QUALIFIED_EDITS)
    file = tmp_path / "e.yaml"
    file.write_text(edited(text, "kind: qualified", "kind: experimental"))
    loaded = load.load(str(file))
    assert {".".join(map(str, d.path)) for d in loaded.deviations} == {edit[2] for edit in QUALIFIED_EDITS}


def test_experimental_cannot_break_the_structure(tmp_path: Path) -> None:
    text = edited(QUALIFIED, "kind: qualified", "kind: experimental")
    text = edited(text, "  sequences: 1", "  sequences: 2")
    error = refusal(text, tmp_path)
    assert isinstance(error, ProfileInvalidError)
    assert any("mtp works with one sequence" in line for line in error.context)


@pytest.mark.parametrize("value", ["261888", "262140", "262144"])
def test_context_of_the_qualified_profile(value: str, tmp_path: Path) -> None:
    text = edited(QUALIFIED, "  size: 261888", f"  size: {value}")
    file = tmp_path / "p.yaml"
    file.write_text(text)
    if value == "261888":
        assert load.load(str(file)).profile.context.size == 261_888
        return
    assert any("context.size" in line for line in refusal(text, tmp_path).context)


def test_template_is_experimental_and_says_where_it_deviates() -> None:
    loaded = load.load("experimental")
    keys = {".".join(map(str, d.path)) for d in loaded.deviations}
    assert keys == {"devices.count", "devices.name", "expert_cache.slots"}


def test_differences_name_every_key() -> None:
    demo, qualified = load.load("demo").profile, load.load("2x3090").profile
    found = {key: (left, right) for key, left, right in differences(demo, qualified)}
    assert found["context.size"] == (8192, 261_888)
    assert found["expert_cache.slots"] == (None, 150)
    assert "context.batch" not in found
    assert differences(demo, demo) == []


def test_schema_knows_every_section_and_is_closed() -> None:
    schema = json_schema()
    assert set(schema["properties"]) == set(Profile.model_fields)
    assert schema["additionalProperties"] is False
    assert all(part["additionalProperties"] is False for part in schema["$defs"].values())


# --- whatever is written, the answer is a profile or reasons ----------------------------------------------

LINES = DEMO.splitlines()
SNIPPETS = st.sampled_from(
    [
        "on",
        "010",
        "~",
        "[",
        "]",
        "{a: b}",
        "&a",
        "*a",
        "\t",
        "!!x",
        "'",
        '"',
        ": ",
        "- ",
        "2k",
        "1e9",
        "é",
        "%",
    ]
)


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=400))
def test_any_bytes(raw: bytes) -> None:
    checked = load.check(raw, Path("any.yaml"))
    assert (checked.loaded is None) == bool(checked.problems)


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_mutated_profiles(data: st.DataObject) -> None:
    lines = list(LINES)
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(lines) - 1))
        match data.draw(st.sampled_from(["drop", "double", "indent", "value", "text"])):
            case "drop":
                lines[at] = ""
            case "double":
                lines.insert(at, lines[at])
            case "indent":
                lines[at] = data.draw(st.sampled_from(["", " ", "   "])) + lines[at].strip()
            case "value":
                lines[at] = lines[at].partition(":")[0] + ": " + data.draw(SNIPPETS)
            case _:
                lines[at] += data.draw(st.text(max_size=8) | SNIPPETS)
    text = "\n".join(lines)
    checked = load.check(text.encode("utf-8", "replace"), Path("m.yaml"))
    assert (checked.loaded is None) == bool(checked.problems)
    assert all(p.text and p.line <= text.count("\n") + 2 for p in checked.problems)


@settings(max_examples=100, deadline=None)
@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(max_size=5),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(st.sampled_from([*Profile.model_fields, "x"]), inner, max_size=3)
        ),
        max_leaves=10,
    )
)
def test_any_value_for_any_section(value: Any) -> None:
    data = yaml.safe_load(DEMO)
    for key in Profile.model_fields:
        text = yaml.safe_dump({**data, key: value})
        load.check(text.encode(), Path("v.yaml"))

"""A small upstream for tests: an sdist with a llama.cpp folder, pins for it, and features that edit it."""

from __future__ import annotations

import difflib
import hashlib
import io
import json
import sys
import tarfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from flashnext.build import tree
from flashnext.build.pin import Pin
from flashnext.cli import main


def numbered(name: str, count: int = 60) -> str:
    """A source file whose lines are all different."""
    return "".join(f"int {name}_{i} = {i};\n" for i in range(1, count + 1))


SOURCE = {
    "CMakeLists.txt": "project(small)\n",
    "common/arg.cpp": numbered("arg"),
    "src/core.cpp": numbered("core"),
    "src/.gitattributes": "*.cpp text eol=crlf ident\n",
    ".gitignore": "core.cpp\n",
    "models/vocab.gguf": "not for a build",
    "models/vocab.inp": "kept",
    ".git": "gitdir: elsewhere\n",
    "ggml/.git/HEAD": "ref: refs/heads/other\n",
}
TOP = "small_llama-1.0"
SOURCE_DIR = "vendor/llama.cpp"


def make_sdist(
    path: Path, files: Mapping[str, str] = SOURCE, *, extra: Iterable[tarfile.TarInfo] = (), top: str = TOP
) -> Path:
    """Write a .tar.gz: ``files`` below the source folder, one file outside it, and raw members."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w:gz", compresslevel=1) as archive:
        members = {f"{top}/{SOURCE_DIR}/{name}": text for name, text in files.items()}
        for name, text in {f"{top}/setup.py": "# not ours\n", **members}.items():
            content = text.encode()
            info = tarfile.TarInfo(name)
            info.size, info.mtime, info.mode = len(content), 1_000_000_000, 0o644
            archive.addfile(info, io.BytesIO(content))
        for info in extra:
            archive.addfile(info, io.BytesIO(b"\0" * info.size))
    return path


def pin_of(sdist: Path, *, version: str = "1.0", commit: str = "0123abc") -> Pin:
    content = sdist.read_bytes()
    return Pin(
        name="small-llama",
        version=version,
        filename=sdist.name,
        size_bytes=len(content),
        sha256=hashlib.sha256(content).hexdigest(),
        source_dir=SOURCE_DIR,
        upstream_commit=commit,
        licence="MIT",
    )


def write_pin(path: Path, pin: Pin) -> Path:
    path.write_text("".join(f"{key} = {json.dumps(value)}\n" for key, value in pin.model_dump().items()))
    return path


def blob(text: str) -> str:
    content = text.encode()
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def diff_of(path: str, old: str, new: str, *, context: int = 3) -> str:
    """One file's part of a hooks.patch, made without git."""
    lines = difflib.unified_diff(
        old.splitlines(keepends=True), new.splitlines(keepends=True), f"a/{path}", f"b/{path}", n=context
    )
    head = f"diff --git a/{path} b/{path}\nindex {blob(old)}..{blob(new)} 100644\n"
    return head + "".join(lines)


@dataclass
class Upstream:
    """The small world of one test: sdist, pin, patches; ``now`` is the source with the series so far."""

    root: Path
    files: dict[str, str] = field(default_factory=lambda: dict(SOURCE))

    def __post_init__(self) -> None:
        self.sdist = make_sdist(self.root / "sdist" / f"{TOP}.tar.gz", self.files)
        self.pin = pin_of(self.sdist)
        self.pin_file = write_pin(self.root / "pin.toml", self.pin)
        self.patches = self.root / "patches"
        self.patches.mkdir()
        (self.patches / "series").write_text("# in order of application\n")
        self.now = dict(self.files)

    def pristine(self) -> Path:
        return tree.pristine_tree(self.pin, lambda: self.sdist)

    def feature(
        self,
        name: str,
        edits: Mapping[str, tuple[str, str]] | None = None,
        *,
        requires: Iterable[str] = (),
        toml: str = "",
        body: str = "The reason.",
        context: int = 3,
        onto: Mapping[str, str] | None = None,
    ) -> Path:
        """Add a feature. ``edits`` maps a file to one (old text, new text) replacement in it."""
        folder = self.patches / name
        folder.mkdir()
        needs = json.dumps(list(requires))
        (folder / "feature.toml").write_text(
            f'id = "{name}"\nsummary = "what {name} does"\nrequires = {needs}\n'
            f'kill_switch = "none: a test"\n{toml}'
        )
        (folder / "README.md").write_text(f"# {name}\n\nWhy.\n")
        parts = []
        for path, (old, new) in (edits or {}).items():
            base = (onto or self.now)[path]
            assert base.count(old) == 1, (path, old)
            changed = base.replace(old, new)
            parts.append(diff_of(path, base, changed, context=context))
            self.now[path] = self.now[path].replace(old, new)
        if parts:
            mail = f"From: flashnext <flashnext@localhost>\nSubject: [PATCH] {name}: what {name} does\n"
            (folder / "hooks.patch").write_text(f"{mail}\n{body}\n\n" + "".join(parts))
        with (self.patches / "series").open("a") as stream:
            stream.write(f"{name}\n")
        return folder

    def source(self, feature: str, name: str, text: str = "static int fn_unused;\n") -> Path:
        path = self.patches / feature / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path

    def args(self) -> list[str]:
        """The options that point a command at this world."""
        return ["--patches", str(self.patches), "--pin", str(self.pin_file), "--sdist", str(self.sdist)]


@dataclass(frozen=True)
class Ran:
    code: int
    out: str
    err: str

    def error(self) -> dict[str, object]:
        """The JSON form of the error that the command printed."""
        found = json.loads(self.out)
        assert isinstance(found, dict)
        return found


def run_cli(arguments: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Ran:
    """Run ``flashnext ...`` in this process, as its entry point does."""
    monkeypatch.setattr(sys, "argv", ["flashnext", *arguments])
    capsys.readouterr()
    code = 0
    try:
        main()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1 if end.code else 0
    shown = capsys.readouterr()
    return Ran(code, shown.out, shown.err)


def refused(ran: Ran, *, code: int, id: str) -> str:
    """Assert how a command was refused, hint included; returns everything it said."""
    assert ran.code == code, ran
    assert f"error[{id}]: " in ran.err, ran.err
    hint = ran.err.split("hint: ", 1)[1].strip()
    assert hint, ran.err
    assert "Traceback" not in ran.err
    return ran.err

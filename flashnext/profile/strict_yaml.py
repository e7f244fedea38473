"""YAML without its surprises: one reading of every line, or a refusal that names the line.

Built on PyYAML's composer, so that the syntax is the real one and every node has its position. What YAML 1.1
would guess at (``on``, ``010``, ``1_000``, merge keys, anchors, tags, the last of two equal keys) is refused.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import yaml

Path = tuple[str | int, ...]

MAX_BYTES = 256 * 1024
MAX_DEPTH = 12

_INTEGER = re.compile(r"-?(0|[1-9][0-9]{0,17})")
_DECIMAL = re.compile(r"-?(0|[1-9][0-9]{0,17})\.[0-9]{1,17}")
# What some YAML reader would take for a number, and another for text or another number.
_NUMBERLIKE = re.compile(
    r"[-+]?(0[0-9_]+|0[xX][0-9a-fA-F_]+|0[oObB][0-7_]+|[0-9][0-9_]*|[0-9][0-9_]*\.[0-9_]*|\.[0-9_]+"
    r"|[0-9.][0-9_.]*[eE][-+]?[0-9]+|\.(inf|Inf|INF|nan|NaN|NAN))"
)
_BOOL_WORDS = frozenset({"yes", "no", "on", "off", "y", "n", "true", "false"})


@dataclass(frozen=True, order=True)
class Problem:
    """One thing wrong with a file: 1-based line (0: the file as a whole), dotted key, what and why."""

    line: int
    key: str
    text: str

    def render(self, file: str) -> str:
        place = f"{file}:{self.line}" if self.line else file
        return f"{place}: {self.key}: {self.text}" if self.key else f"{place}: {self.text}"


@dataclass
class Document:
    """What a file says. ``data`` is None when it could not be read far enough to mean anything."""

    data: dict[str, Any] | None = None
    lines: dict[Path, int] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)

    def line(self, path: Path) -> int:
        """The line of a key, or of the nearest section around it that the file has."""
        while path:
            if path in self.lines:
                return self.lines[path]
            path = path[:-1]
        return 0


def dotted(path: Path) -> str:
    """``("devices", "split", 0)`` as ``devices.split[0]``."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text


def read(raw: bytes) -> Document:
    """Read a document whose top is a mapping. Never raises: what is wrong is in ``problems``."""
    doc = Document()
    if len(raw) > MAX_BYTES:
        doc.problems.append(Problem(0, "", f"larger than {MAX_BYTES} bytes: this is no profile"))
        return doc
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        line = raw[: error.start].count(b"\n") + 1
        doc.problems.append(Problem(line, "", "not UTF-8 text"))
        return doc
    tabs = [n for n, line in enumerate(text.split("\n"), 1) if "\t" in line]
    doc.problems += [Problem(n, "", "a tab: indent and separate with spaces") for n in tabs]
    root = _compose(text, doc, tabs=bool(tabs))
    if root is None:
        if not doc.problems:
            doc.problems.append(Problem(0, "", "empty: a profile is a mapping of sections"))
        return doc
    if not isinstance(root, yaml.MappingNode):
        doc.problems.append(Problem(_line(root), "", "a profile is a mapping of sections (`key: value`)"))
        return doc
    doc.data = _mapping(root, (), doc)
    doc.problems.sort()
    return doc


class _StopReadingError(Exception):
    """Composing cannot go on; the problem is recorded already."""


class _Loader(yaml.SafeLoader):
    """PyYAML's composer that notes anchors, aliases and tags instead of following them."""

    def __init__(self, text: str, doc: Document) -> None:
        super().__init__(text)
        self.doc = doc
        self.depth = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        event = self.peek_event()  # type: ignore[no-untyped-call]
        line = event.start_mark.line + 1
        if self.check_event(yaml.AliasEvent):
            self.get_event()  # type: ignore[no-untyped-call]
            self.doc.problems.append(Problem(line, "", f"alias *{event.anchor}: write the value out"))
            return yaml.ScalarNode("tag:yaml.org,2002:str", "", event.start_mark, event.end_mark, style='"')
        if event.anchor is not None:
            self.doc.problems.append(Problem(line, "", f"anchor &{event.anchor}: write the value out"))
            event.anchor = None
        if event.tag is not None:
            self.doc.problems.append(Problem(line, "", f"tag {event.tag}: quote text, leave numbers bare"))
            event.tag = None
        if self.depth >= MAX_DEPTH:
            self.doc.problems.append(Problem(line, "", f"nested deeper than {MAX_DEPTH}"))
            raise _StopReadingError
        self.depth += 1
        try:
            return super().compose_node(parent, index)
        finally:
            self.depth -= 1


def _compose(text: str, doc: Document, *, tabs: bool) -> yaml.Node | None:
    try:
        loader = _Loader(text, doc)
        return loader.get_single_node()
    except _StopReadingError:
        return None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = mark.line + 1 if mark else 0
        if not tabs:
            doc.problems.append(Problem(line, "", f"not YAML: {error.problem or error.context}"))
        return None
    except yaml.reader.ReaderError as error:
        line = text[: error.position].count("\n") + 1
        doc.problems.append(
            Problem(line, "", f"a character that YAML does not allow (#x{error.character:04x})")
        )
        return None
    except (ValueError, OverflowError) as error:
        # PyYAML converts escapes and %YAML directives with plain int(); what overflows there ends here
        doc.problems.append(Problem(0, "", f"not YAML: {error}"))
        return None


def _line(node: yaml.Node) -> int:
    return int(node.start_mark.line) + 1


def _value(node: yaml.Node, path: Path, doc: Document) -> Any:
    if isinstance(node, yaml.MappingNode):
        return _mapping(node, path, doc)
    if isinstance(node, yaml.SequenceNode):
        items = []
        for index, item in enumerate(node.value):
            doc.lines[(*path, index)] = _line(item)
            items.append(_value(item, (*path, index), doc))
        return tuple(items)
    assert isinstance(node, yaml.ScalarNode)
    return _scalar(node, path, doc)


def _mapping(node: yaml.MappingNode, path: Path, doc: Document) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for key, value, line in _entries(node, path, doc):
        here = (*path, key)
        if key in result:
            text = f"given twice, on lines {doc.lines[here]} and {line}: keep one"
            doc.problems.append(Problem(line, dotted(here), text))
            continue
        doc.lines[here] = line
        result[key] = _value(value, here, doc)
    return result


def _entries(node: yaml.MappingNode, path: Path, doc: Document) -> Iterator[tuple[str, yaml.Node, int]]:
    for key, value in node.value:
        line = _line(key)
        if not isinstance(key, yaml.ScalarNode) or not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_.-]*", key.value):
            shown = key.value if isinstance(key, yaml.ScalarNode) else "a list or mapping"
            why = (
                "merge keys are not supported: write the values out" if shown == "<<" else "no name for a key"
            )
            doc.problems.append(Problem(line, dotted(path), f"{str(shown)[:40]!r}: {why}"))
            continue
        yield key.value, value, line


def _scalar(node: yaml.ScalarNode, path: Path, doc: Document) -> Any:
    text = str(node.value)
    if node.style is not None:
        return text

    def refuse(why: str) -> Refused:
        doc.problems.append(Problem(_line(node), dotted(path), why))
        return REFUSED

    if text in ("", "~") or text.lower() == "null":
        return refuse("no value: give one, or remove the key")
    if text in ("true", "false"):
        return text == "true"
    if text.lower() in _BOOL_WORDS:
        return refuse(f"`{text}` can be read as text or as yes/no: write true or false, or quote it")
    if _INTEGER.fullmatch(text):
        return int(text)
    if _DECIMAL.fullmatch(text):
        return float(text)
    if _NUMBERLIKE.fullmatch(text):
        return refuse(
            f"`{text}` is read as different numbers by different readers: plain decimal digits only"
        )
    return text


class Refused:
    """Stands for a value that is already reported, so that no second problem is reported for it."""

    def __repr__(self) -> str:
        return "REFUSED"


REFUSED = Refused()

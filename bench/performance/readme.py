"""The performance section of README.md, written from bench/results alone.

    python bench/performance/readme.py            # prints it
    python bench/performance/readme.py --write    # puts it between the marks in README.md
    python bench/performance/readme.py --check    # exit code 1 where README.md says something else

Every folder of results with an ``about.yaml`` (machine, model, commands, reasons of misses) is read: its
files by the readers of readings.py, folders of `flashnext bench` in it (``samples.jsonl``) by their gates.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import bench_runs
import yaml
from readings import READERS, Figure, load

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "bench" / "results"
README = ROOT / "README.md"
BEGIN = "<!-- performance:begin: written by `python bench/performance/readme.py --write` -->"
END = "<!-- performance:end -->"
NOT_OURS = "No figure here is from an RTX 3090 or from two GPUs."
HEADS = ("what", "ours", "against", "ratio", "goal")


def section(folder: Path = RESULTS) -> str:
    """The whole text between the marks."""
    parts = [part for about in sorted(folder.glob("*/about.yaml")) for part in _set(about)]
    if not parts:
        parts = ["Nothing was measured yet."]
    return "\n\n".join([*parts, NOT_OURS])


def _set(about_file: Path) -> Iterator[str]:
    """One machine's results: a sentence, the table, what was missed, the commands."""
    folder = about_file.parent
    about: dict[str, Any] = yaml.safe_load(about_file.read_text(encoding="utf-8"))
    figures: list[Figure] = []
    sources: list[str] = []
    notes: dict[str, str] = about.get("runs") or {}  # of runs of the bench, by folder
    for name, entry in about["files"].items():
        figures += _figures(folder / name, entry)
        sources.append(
            f"- [{name}]({_link(folder / name)}), {entry['date']}: `{entry['command']}`; {entry['note']}"
        )
    for path in _runs(folder, about):
        samples, found = bench_runs.read(path.parent)
        figures += found
        header = samples.header
        words = " ".join(header.command)
        sittings = len(set(samples.sitting.values()))
        sources.append(
            f"- [{path.parent.name}]({_link(path.parent)}), {header.created[:10]}: `{words}`; "
            f"{len(samples.processes)} of {len(header.plan['sessions'])} planned processes"
            + (f" in {sittings} sittings" if sittings > 1 else "")
            + "".join(f"; {note}" for name, note in notes.items() if name == path.parent.name)
        )
    yield (
        f"Measured on {about['machine']}; {about['model']}. Values are single runs; where there are more "
        "than four, median and range."
    )
    yield "\n".join(_table([f for f in figures if f.goal]))
    yield "<details><summary>Figures without a declared goal</summary>"
    yield "\n".join(_table([f for f in figures if not f.goal]))
    yield "</details>"
    yield from _plots(_runs(folder, about))
    yield "\n".join(_misses(figures, about.get("reasons") or {}))
    yield "\n".join(["Sources, each one sitting where no other number is said:", "", *sources])


def _figures(file: Path, entry: dict[str, Any]) -> Iterator[Figure]:
    """A file's figures; with a ``label`` they say it, and their ids begin with the file's name."""
    label = entry.get("label")
    for figure in READERS[entry["reader"]](load(file)):
        if label is None:
            yield figure
        else:
            yield replace(figure, id=f"{file.stem}/{figure.id}", what=f"{figure.what} ({label})")


def undescribed(folder: Path = RESULTS) -> list[str]:
    """JSON lines beside an about.yaml that it neither reads nor names as left out."""
    found = []
    for about_file in sorted(folder.glob("*/about.yaml")):
        about = yaml.safe_load(about_file.read_text(encoding="utf-8"))
        known = {*about["files"], *about.get("left_out", {})}
        found += [str(p) for p in sorted(about_file.parent.glob("*.jsonl")) if p.name not in known]
    return found


def _link(path: Path) -> str:
    return path.relative_to(ROOT).as_posix() if path.is_relative_to(ROOT) else path.name


def _runs(folder: Path, about: dict[str, Any]) -> list[Path]:
    """The samples of the bench's runs beside it, but of those that it leaves out."""
    left_out = about.get("left_out", {})
    return [p for p in sorted(folder.glob("*/samples.jsonl")) if p.parent.name not in left_out]


def _plots(runs: Iterable[Path]) -> Iterator[str]:
    """Of every run of the bench: prompts over depth, and the devices' memory over a prompt."""
    for samples in runs:
        for title in ("Reading speed over depth", "Memory of the devices over a prompt"):
            plot = samples.parent / "plots" / f"{title.lower().replace(' ', '-')}.svg"
            if plot.exists():
                yield f"![{title} ({samples.parent.name})]({_link(plot)})"


def _table(figures: list[Figure]) -> Iterator[str]:
    yield f"| {' | '.join(HEADS)} |"
    yield f"|{'---|' * len(HEADS)}"
    for f in figures:
        ratio = "" if f.ratio is None else f"{f.ratio:.2f} x{f.interval}"
        goal = f.goal if f.reached is None else f"{f.goal}: {'reached' if f.reached else '**missed**'}"
        yield f"| {f.what} | {f.ours} | {f.against} | {ratio} | {goal} |"


def _misses(figures: list[Figure], reasons: dict[str, str]) -> Iterator[str]:
    missed = [(f.id, f"{f.what}: {f.ours}{_beside(f)}, goal {f.goal}") for f in figures if f.reached is False]
    if not missed:
        yield "No declared goal of these was missed."
        return
    yield "Missed:"
    yield ""
    for id_, text in missed:
        reason = next((why for key, why in reasons.items() if id_ == key or id_.startswith(f"{key}-")), None)
        yield f"- {text}. {'Reason: ' + reason.strip() if reason else 'The reason was not found'}."


def _beside(figure: Figure) -> str:
    """What stands beside ours: the other side, or the parts of ours where there is no other side."""
    if not figure.against:
        return ""
    return f" ({figure.against})" if figure.ratio is None else f" against {figure.against}"


def between_marks(text: str) -> tuple[str, str, str]:
    """README before, between and after the marks."""
    if text.count(BEGIN) != 1 or text.count(END) != 1:
        sys.exit(f"README.md must hold both marks once: {BEGIN} and {END}")
    before, _, rest = text.partition(BEGIN)
    inside, _, after = rest.partition(END)
    return before, inside, after


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    made = section()
    if not options.write and not options.check:
        print(made)
        return 0
    before, inside, after = between_marks(README.read_text(encoding="utf-8"))
    if options.check:
        same = inside.strip() == made.strip()
        print(
            "README.md says what the results say" if same else "README.md differs from bench/results: --write"
        )
        return 0 if same else 1
    README.write_text(f"{before}{BEGIN}\n{made}\n{END}{after}", encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

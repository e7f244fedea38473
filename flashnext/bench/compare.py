"""Two results side by side: cells of equal name, unpaired, and what that cannot tell."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import ValidationError

from flashnext.bench import result as results
from flashnext.bench.metrics import METRICS
from flashnext.bench.result import MARGIN, Result
from flashnext.bench.samples import file_in as sample_file
from flashnext.bench.stats import LEVEL, Ratio, student_t, verdict
from flashnext.errors import SamplesUnreadableError

CAUTION = (
    "two runs, unpaired: a difference of machine, clocks or temperature between them is in these ratios; "
    "only arms of one run are compared fairly"
)
_ORIGIN = (
    "profile_facts.devices", "model.file", "model.size_bytes", "host.cpu", "host.cores", "gpu.cards",
    "gpu.driver", "vram_limit.left_free_bytes",
)  # fmt: skip


@dataclass(frozen=True)
class Row:
    """One cell: B over A."""

    scenario: str
    metric: str
    cell: str
    arm: str
    a: float
    b: float
    ratio: float
    low: float | None
    high: float | None
    n: str
    verdict: str


def load(path: Path) -> Result:
    """A result.json, or that of a folder. Raises SamplesUnreadableError."""
    file = results.file_in(path) if path.is_dir() else path
    hint = "compare takes a result.json or its folder (from llama-bench's: `flashnext bench import`)"
    if path.is_dir() and not file.exists() and sample_file(path).exists():
        hint = f"`flashnext bench report {path}` writes it from the samples"
    try:
        data: Any = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise SamplesUnreadableError(f"cannot read {file}", context=[str(error)], hint=hint) from None
    try:
        document = {k: v for k, v in dict(data).items() if k not in ("gates", "outcome")}
        return Result.model_validate(document)
    except ValidationError as error:
        lines = [f"{'.'.join(map(str, e['loc']))}: {e['msg'].lower()}" for e in error.errors()[:3]]
        more = [f"and {error.error_count() - 3} more"] if error.error_count() > 3 else []
        raise SamplesUnreadableError(
            f"{file} is not a result of the bench", context=[*lines, *more], hint=hint
        ) from None
    except (TypeError, ValueError):
        raise SamplesUnreadableError(f"{file} is not a result of the bench", hint=hint) from None


def compare(a: Result, b: Result) -> list[Row]:
    """Every cell that both have."""
    theirs = {(c.scenario, c.metric, c.cell, c.arm): c for c in b.cells}
    rows = []
    for cell in a.cells:
        other = theirs.get((cell.scenario, cell.metric, cell.cell, cell.arm))
        if other is None:
            continue
        found = unpaired_ratio(cell.values, other.values)
        known = not math.isnan(found.low)
        rows.append(
            Row(
                scenario=cell.scenario,
                metric=cell.metric,
                cell=cell.cell,
                arm=cell.arm,
                a=cell.median,
                b=other.median,
                ratio=found.estimate,
                low=found.low if known else None,
                high=found.high if known else None,
                n=f"{cell.processes}, {other.processes}",
                verdict=str(
                    verdict(found, higher_is_better=METRICS[cell.metric].higher_is_better, margin=MARGIN)
                ),
            )
        )
    return rows


def differences(a: Result, b: Result) -> list[str]:
    """What the two were not measured with alike: ``name: x in A, y in B``."""
    pairs = {"profile": (a.profile, b.profile), "seed": (a.seed, b.seed)}
    pairs |= {name: (_fact(a, name), _fact(b, name)) for name in _ORIGIN}
    return [f"{name}: {x} in A, {y} in B" for name, (x, y) in pairs.items() if x != y]


def contents(result: Result) -> str:
    """Arms and cells of a result in a line."""
    cells = dict.fromkeys(f"{c.scenario} {c.cell}" for c in result.cells)
    return f"arms {', '.join(result.arms)}; cells {', '.join(cells) or 'none'}"


def _fact(result: Result, name: str) -> Any:
    found: Any = result.facts
    for key in name.split("."):
        found = found.get(key) if isinstance(found, dict) else None
    if isinstance(found, list):
        return ", ".join(str(card.get("name")) for card in found if isinstance(card, dict))
    return "nothing" if found is None else found


def unpaired_ratio(a: Sequence[float], b: Sequence[float], *, level: float = LEVEL) -> Ratio:
    """Ratio of the geometric means b / a with Welch's interval over processes; n is the smaller count."""
    x, y = np.log(np.asarray(a, dtype=float)), np.log(np.asarray(b, dtype=float))
    n = min(len(x), len(y))
    estimate = float(y.mean() - x.mean())
    if n < 2:
        return Ratio(n, math.exp(estimate), math.nan, math.nan, level)
    vx, vy = float(x.var(ddof=1)) / len(x), float(y.var(ddof=1)) / len(y)
    if vx + vy == 0:
        return Ratio(n, math.exp(estimate), math.exp(estimate), math.exp(estimate), level)
    freedom = (vx + vy) ** 2 / (vx**2 / (len(x) - 1) + vy**2 / (len(y) - 1))
    reach = student_t(level, max(1, int(freedom))) * math.sqrt(vx + vy)
    return Ratio(n, math.exp(estimate), math.exp(estimate - reach), math.exp(estimate + reach), level)


def as_json(rows: Sequence[Row], different: Sequence[str]) -> dict[str, Any]:
    return {"caution": CAUTION, "differences": list(different), "rows": [asdict(r) for r in rows]}

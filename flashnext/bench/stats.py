"""Statistics of a comparison: the server *process* is the unit, never the request.

Requests of one process share its memory layout, clocks and cache, so they are no independent evidence: they
are reduced to their median first. A pair is one control process and one candidate process of the same half
block. Where control ran before candidate a drift of the machine moves the ratio one way, in the mirrored half
of the block the other way: pairs are resampled *within their order*, so a linear drift cancels in every
resample as it does in the run.

The interval is the bootstrap standard error of the mean log ratio times Student's t with n - orders degrees
of freedom. A plain percentile interval would be bounded by the extreme pairs and claim far too much at n = 4
(T. Hesterberg, "What Teachers Should Know About the Bootstrap", 2015, on the narrowness of small bootstraps).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from flashnext.bench.extra import needed_for

LEVEL = 0.98  # of every interval; two-sided, so a verdict errs in at most 2% of null comparisons
RESAMPLES = 2000
NEGLIGIBLE = 0.005  # a relative difference that is surely below this is none
MIN_PROCESSES = 4  # per arm: below, two degrees of freedom are not left and no verdict is given


class Verdict(StrEnum):
    BETTER = "better"
    WORSE = "worse"
    SAME = "no difference"
    INCONCLUSIVE = "inconclusive"


@dataclass(frozen=True)
class Summary:
    """Of one value per process: how many, the median and the range."""

    n: int
    median: float
    low: float
    high: float


@dataclass(frozen=True)
class Pair:
    """One control and one candidate process of a half block; ``control_first``: their order in time."""

    control_first: bool
    control: float
    candidate: float


@dataclass(frozen=True)
class Ratio:
    """candidate / control (geometric mean over pairs) with its interval; NaN bounds where n is too small."""

    n: int
    estimate: float
    low: float
    high: float
    level: float = LEVEL

    @property
    def half_width(self) -> float:
        """Of the interval, relative to the estimate."""
        return (self.high - self.low) / (2 * self.estimate)


def summarise(values: Sequence[float]) -> Summary:
    """Median and range. Raises ValueError on no values."""
    if not values:
        raise ValueError("no values to summarise")
    return Summary(len(values), float(np.median(values)), float(min(values)), float(max(values)))


def paired_ratio(pairs: Sequence[Pair], *, seed: int = 0, level: float = LEVEL) -> Ratio:
    """The ratio candidate / control of positive values and its interval (see the module's text)."""
    if not pairs:
        return Ratio(0, math.nan, math.nan, math.nan, level)
    if any(p.control <= 0 or p.candidate <= 0 for p in pairs):
        raise ValueError("ratios need positive values")
    logs = np.array([math.log(p.candidate / p.control) for p in pairs])
    strata = _strata(pairs, logs)
    n, freedom = len(pairs), len(pairs) - len(strata)
    # each order weighs the same, so that the drift cancels when a run was cut short in the middle of a block
    estimate = float(np.mean([s.mean() for s in strata]))
    if freedom < 1 or any(len(s) < 2 for s in strata):
        return Ratio(n, math.exp(estimate), math.nan, math.nan, level)
    rng = np.random.default_rng(seed)
    means = np.zeros(RESAMPLES)
    for stratum in strata:
        m = len(stratum)
        picks = rng.integers(0, m, size=(RESAMPLES, m))
        # a resample of m values has the variance (m - 1) / m of the one it stands for
        means += (stratum[picks].mean(axis=1) - stratum.mean()) * math.sqrt(m / (m - 1)) / len(strata)
    reach = student_t(level, freedom) * float(means.std())
    return Ratio(n, math.exp(estimate), math.exp(estimate - reach), math.exp(estimate + reach), level)


def _strata(pairs: Sequence[Pair], logs: NDArray[np.float64]) -> list[NDArray[np.float64]]:
    """Log ratios by order; one stratum of all where an order has fewer than two pairs."""
    first = np.array([p.control_first for p in pairs])
    split = [part for part in (logs[first], logs[~first]) if len(part)]
    return split if all(len(s) >= 2 for s in split) else [logs]


def student_t(level: float, freedom: int) -> float:
    """The two-sided quantile of Student's t."""
    with needed_for("an interval"):
        from scipy import stats
    return float(stats.t.ppf(0.5 + level / 2, freedom))


def verdict(
    ratio: Ratio, *, higher_is_better: bool, margin: float, min_processes: int = MIN_PROCESSES
) -> Verdict:
    """What a ratio says. ``margin``: a relative difference up to which two arms count as the same.

    Better or worse: the interval excludes 1. No difference: it includes 1 and lies within the margin, or it
    lies within NEGLIGIBLE of 1. Anything else, and fewer processes per arm than ``min_processes``, is
    inconclusive.
    """
    if ratio.n < min_processes or math.isnan(ratio.low):
        return Verdict.INCONCLUSIVE
    if ratio.low >= 1 - NEGLIGIBLE and ratio.high <= 1 + NEGLIGIBLE:
        return Verdict.SAME
    if ratio.low > 1:
        return Verdict.BETTER if higher_is_better else Verdict.WORSE
    if ratio.high < 1:
        return Verdict.WORSE if higher_is_better else Verdict.BETTER
    if ratio.low >= 1 - margin and ratio.high <= 1 + margin:
        return Verdict.SAME
    return Verdict.INCONCLUSIVE


@dataclass(frozen=True)
class Matched:
    """Matched right/wrong answers of two arms. ``lost``: control right, candidate wrong; ``won``: reverse."""

    both: int
    neither: int
    lost: int
    won: int

    @property
    def n(self) -> int:
        return self.both + self.neither + self.lost + self.won

    @property
    def p(self) -> float:
        return mcnemar(self.lost, self.won)


def matched(answers: Sequence[tuple[bool, bool]]) -> Matched:
    """Count (control right, candidate right) pairs."""
    return Matched(
        both=sum(a and b for a, b in answers),
        neither=sum(not a and not b for a, b in answers),
        lost=sum(a and not b for a, b in answers),
        won=sum(b and not a for a, b in answers),
    )


def mcnemar(lost: int, won: int) -> float:
    """Two-sided p of the exact McNemar test: a binomial test of the discordant pairs at one half."""
    n = lost + won
    if n == 0:
        return 1.0
    tail = sum(math.comb(n, k) for k in range(min(lost, won) + 1)) / 2**n
    return float(min(1.0, 2 * tail))


def matched_verdict(
    answers: Matched, *, processes: int, min_processes: int = MIN_PROCESSES, level: float = LEVEL,
    margin: float = 0.05,
) -> Verdict:  # fmt: skip
    """Better or worse: p < 1 - level. No difference: the interval of (won - lost) / n is in the margin."""
    if processes < min_processes or answers.n == 0:
        return Verdict.INCONCLUSIVE
    if answers.p < 1 - level:
        return Verdict.BETTER if answers.won > answers.lost else Verdict.WORSE
    low, high = matched_interval(answers, level=level)
    return Verdict.SAME if low >= -margin and high <= margin else Verdict.INCONCLUSIVE


def matched_interval(answers: Matched, *, level: float = LEVEL) -> tuple[float, float]:
    """Interval of the difference of the two shares of right answers.

    Wald with the pseudo-counts of A. Agresti and Y. Min (2005), which hold at few discordant pairs.
    """
    with needed_for("an interval"):
        from scipy import stats
    z = float(stats.norm.ppf(0.5 + level / 2))
    n, won, lost = answers.n + 2, answers.won + 0.5, answers.lost + 0.5
    centre = (won - lost) / n
    reach = z * math.sqrt((won + lost) - (won - lost) ** 2 / n) / n
    return centre - reach, centre + reach

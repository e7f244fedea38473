"""Known distributions in, right verdicts out."""

import math
import random
from collections import Counter

import pytest

from flashnext.bench.plan import order
from flashnext.bench.stats import (
    Matched,
    Pair,
    Verdict,
    matched,
    matched_interval,
    matched_verdict,
    mcnemar,
    paired_ratio,
    summarise,
    verdict,
)

RUNS = 500
NOISE = 0.01  # standard deviation of a process, relative


def simulate(
    rng: random.Random, processes: int, effect: float, drift: float = 0.0, noise: float = NOISE
) -> list[Pair]:
    """One run in the harness's own order: each process with its noise, the machine drifting per process."""
    values: dict[tuple[int, int], dict[str, tuple[int, float]]] = {}
    for s in order(["control", "candidate"], processes // 2, group="shared", seed=rng.randrange(10**6)):
        factor = effect if s.arm == "candidate" else 1.0
        value = 100 * factor * math.exp(rng.gauss(0, noise) + drift * s.index)
        values.setdefault((s.block, s.half), {})[s.arm] = (s.index, value)
    return [
        Pair(v["control"][0] < v["candidate"][0], v["control"][1], v["candidate"][1]) for v in values.values()
    ]


def verdicts(processes: int, effect: float, drift: float = 0.0, seed: int = 1) -> Counter[Verdict]:
    rng = random.Random(seed)
    return Counter(
        verdict(paired_ratio(simulate(rng, processes, effect, drift)), higher_is_better=True, margin=0.03)
        for _ in range(RUNS)
    )


@pytest.mark.parametrize("processes", [4, 6, 8])
@pytest.mark.parametrize("drift", [0.0, -0.01])
def test_type_one_error_is_under_five_percent(processes: int, drift: float) -> None:
    found = verdicts(processes, effect=1.0, drift=drift)
    assert (found[Verdict.BETTER] + found[Verdict.WORSE]) / RUNS < 0.05


def test_power_to_find_a_regression_of_four_percent() -> None:
    """At 1% noise per process: near certain with six processes per arm, a coin's toss with four."""
    assert verdicts(6, effect=0.96)[Verdict.WORSE] / RUNS > 0.95
    assert 0.3 < verdicts(4, effect=0.96)[Verdict.WORSE] / RUNS < 0.8
    assert verdicts(4, effect=0.96)[Verdict.BETTER] == 0


def test_a_planted_drift_cancels() -> None:
    """A machine that slows by 2% per process looks like a difference in unmirrored order, and not in ours."""
    pairs = simulate(random.Random(3), 6, effect=1.0, drift=-0.02, noise=0.0)
    found = paired_ratio(pairs)
    assert found.estimate == pytest.approx(1.0, abs=1e-12)
    assert found.half_width < 1e-9
    naive = [math.exp(-0.02 * (2 * k + 1)) / math.exp(-0.02 * 2 * k) for k in range(6)]  # A B A B A B
    assert sum(naive) / 6 < 0.985


def test_drift_cancels_when_a_run_was_cut_in_mid_block() -> None:
    pairs = simulate(random.Random(4), 8, effect=0.96, drift=-0.01, noise=0.0)[:-1]
    assert paired_ratio(pairs).estimate == pytest.approx(0.96, abs=1e-9)


def test_no_difference_needs_an_interval_within_the_margin() -> None:
    tight = [Pair(k % 2 == 0, 100, 100 + 0.1 * (-1) ** (k // 2)) for k in range(8)]
    wide = [Pair(k % 2 == 0, 100, 100 + 20 * (-1) ** (k // 2)) for k in range(8)]
    assert verdict(paired_ratio(tight), higher_is_better=True, margin=0.03) == Verdict.SAME
    assert verdict(paired_ratio(wide), higher_is_better=True, margin=0.03) == Verdict.INCONCLUSIVE


def test_a_difference_that_is_surely_tiny_is_none() -> None:
    tiny = paired_ratio([Pair(k % 2 == 0, 100, 100.1 + 0.001 * k) for k in range(6)])
    assert tiny.low > 1
    assert verdict(tiny, higher_is_better=True, margin=0.03) == Verdict.SAME
    one_percent = paired_ratio([Pair(k % 2 == 0, 100, 99 + 0.001 * k) for k in range(6)])
    assert verdict(one_percent, higher_is_better=True, margin=0.03) == Verdict.WORSE


def test_lower_is_better_turns_the_verdict() -> None:
    slower = paired_ratio([Pair(k % 2 == 0, 100, 110 + 0.1 * k) for k in range(6)])
    assert verdict(slower, higher_is_better=False, margin=0.03) == Verdict.WORSE
    assert verdict(slower, higher_is_better=True, margin=0.03) == Verdict.BETTER


@pytest.mark.parametrize("n", [0, 1, 2, 3])
def test_too_few_processes_are_inconclusive_however_large_the_effect(n: int) -> None:
    found = paired_ratio([Pair(k % 2 == 0, 100, 200 + k) for k in range(n)])
    assert found.n == n
    assert verdict(found, higher_is_better=True, margin=0.03) == Verdict.INCONCLUSIVE


def test_ratios_of_nothing_positive_are_refused() -> None:
    with pytest.raises(ValueError, match="positive"):
        paired_ratio([Pair(True, 0.0, 1.0)])
    with pytest.raises(ValueError, match="no values"):
        summarise([])


def test_the_same_seed_gives_the_same_interval() -> None:
    pairs = simulate(random.Random(5), 6, 1.0)
    assert paired_ratio(pairs, seed=9) == paired_ratio(pairs, seed=9)


def test_mcnemar_against_the_binomial_test() -> None:
    from scipy.stats import binomtest

    for lost, won in [(0, 0), (1, 0), (5, 5), (0, 6), (9, 2), (13, 30)]:
        expected = binomtest(lost, lost + won).pvalue if lost + won else 1.0
        assert mcnemar(lost, won) == pytest.approx(expected)


def test_matched_counts() -> None:
    table = matched([(True, True), (True, False), (False, True), (False, False), (True, False)])
    assert (table.both, table.lost, table.won, table.neither, table.n) == (1, 2, 1, 1, 5)


def test_matched_verdicts() -> None:
    same = Matched(both=200, neither=40, lost=0, won=0)
    worse = Matched(both=180, neither=40, lost=20, won=2)
    thin = Matched(both=5, neither=1, lost=1, won=0)
    assert matched_verdict(same, processes=4) == Verdict.SAME
    assert matched_verdict(worse, processes=4) == Verdict.WORSE
    assert matched_verdict(thin, processes=4) == Verdict.INCONCLUSIVE
    assert matched_verdict(same, processes=3) == Verdict.INCONCLUSIVE


def test_mcnemar_verdict_errs_in_under_five_percent_of_null_screens() -> None:
    rng = random.Random(6)
    wrong = 0
    for _ in range(RUNS):
        answers = [(rng.random() < 0.8, rng.random() < 0.8) for _ in range(120)]
        found = matched_verdict(matched(answers), processes=4)
        wrong += found in (Verdict.BETTER, Verdict.WORSE)
    assert wrong / RUNS < 0.05


def test_matched_interval_covers_the_difference() -> None:
    rng = random.Random(7)
    covered = 0
    for _ in range(RUNS):
        answers = [(rng.random() < 0.9, rng.random() < 0.8) for _ in range(120)]
        low, high = matched_interval(matched(answers))
        covered += low <= -0.1 <= high
    assert covered / RUNS > 0.96

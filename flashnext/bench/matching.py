"""Matched comparisons of two arms: equal text, log probabilities of the first token, right and wrong answers.

Items are matched within a half block, where both arms were asked the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pydantic import Field

from flashnext.artefacts import Artefact
from flashnext.bench.samples import Process, Request, Samples
from flashnext.bench.stats import Matched, Verdict, matched, matched_interval, matched_verdict

BASE_ARMS = ("control", "vanilla")
MICRO_BATCH = "ubatch:"


class IdentityResult(Artefact):
    """Greedy texts of matched items that are equal to the byte."""

    scenario: str
    candidate: str
    control: str
    items: int
    equal: int


class LogitResult(Artefact):
    """Differences of the first token's log probabilities over the tokens that both arms listed."""

    scenario: str
    candidate: str
    control: str
    items: int
    tokens: int = Field(0, description="compared in all, over every item")
    vocabulary: int | None = Field(
        None, description="tokens that the spread was drawn from; null: top ones alone"
    )
    max_abs: float
    mean_abs: float
    argmax_equal: int
    histogram: list[tuple[float, float, int]] = Field(description="from, to, count of absolute differences")


class QualityResult(Artefact):
    """Matched answers of one depth (or all: ``pooled``) and one sampling."""

    scenario: str
    cell: str
    sampling: str
    candidate: str
    control: str
    processes: int
    n: int
    control_right: int
    candidate_right: int
    lost: int
    won: int
    p: float
    low: float
    high: float
    verdict: Verdict
    worse_questions: dict[str, int] = Field(
        default={}, description="question -> seeds on which the control was right and the candidate was not"
    )


def arm_pairs(arms: Sequence[str]) -> Iterator[tuple[str, str]]:
    """(control, candidate) for every comparison that a report shows: each arm against each base before it."""
    bases = [arm for arm in BASE_ARMS if arm in arms] or list(arms[:1])
    for base in bases:
        for arm in arms:
            if arm not in bases:
                yield base, arm
    if len(bases) == 2:
        yield "vanilla", "control"


def _against_micro_batch(arms: Sequence[str]) -> Iterator[tuple[str, str]]:
    """The candidate against its micro-batch without a transaction: what the transaction itself changes."""
    yield from ((arm, "candidate") for arm in arms if arm.startswith(MICRO_BATCH) and "candidate" in arms)


def halves(samples: Samples, control: str, candidate: str) -> Iterator[tuple[Process, Process]]:
    """The control and candidate process of every half block that has both."""
    table: dict[tuple[str, int, int], dict[str, Process]] = {}
    groups = {s["index"]: s["group"] for s in samples.header.plan["sessions"]}
    for process in samples.processes:
        key = (groups[process.index], process.block, process.half)
        table.setdefault(key, {})[process.arm] = process
    shared = False
    for arms in table.values():
        if control in arms and candidate in arms:
            sittings = {samples.sitting[arms[name].process] for name in (control, candidate)}
            if len(sittings) > 1:
                continue
            # all "processes" behind a URL that somebody else runs are one process: one pair, no more
            if arms[control].facts.get("shared") or arms[candidate].facts.get("shared"):
                if shared:
                    continue
                shared = True
            yield arms[control], arms[candidate]


def matched_requests(
    samples: Samples, scenario: str, control: str, candidate: str
) -> Iterator[tuple[Request, Request]]:
    """Good requests of the same item in both processes of a half block."""
    by_process: dict[str, dict[str, Request]] = {}
    for request in samples.requests:
        if request.scenario == scenario and request.error is None and not request.cancelled:
            by_process.setdefault(request.process, {})[request.item] = request
    for first, second in halves(samples, control, candidate):
        ours, theirs = by_process.get(first.process, {}), by_process.get(second.process, {})
        for item, request in ours.items():
            if item in theirs:
                yield request, theirs[item]


def _scenarios(samples: Samples, *kinds: str) -> list[str]:
    return [s["id"] for s in samples.header.plan["scenarios"] if s["kind"] in kinds]


def identity(samples: Samples, arms: Sequence[str]) -> list[IdentityResult]:
    results = []
    for scenario in _scenarios(samples, "speed", "logits"):
        for control, candidate in arm_pairs(arms):
            pairs = list(matched_requests(samples, scenario, control, candidate))
            pairs = [(a, b) for a, b in pairs if "/greedy/" in a.item]
            if pairs:
                results.append(
                    IdentityResult(
                        scenario=scenario,
                        candidate=candidate,
                        control=control,
                        items=len(pairs),
                        equal=sum(a.text == b.text for a, b in pairs),
                    )
                )
    return results


def differences(control: Request, candidate: Request) -> list[float]:
    """Absolute differences over the tokens that both listed."""
    ours = dict(control.top)
    return [abs(value - ours[token]) for token, value in candidate.top if token in ours]


def logits(samples: Samples, arms: Sequence[str]) -> list[LogitResult]:
    results = []
    for scenario in _scenarios(samples, "logits"):
        for control, candidate in [*arm_pairs(arms), *_against_micro_batch(arms)]:
            pairs = [
                (a, b) for a, b in matched_requests(samples, scenario, control, candidate) if a.top and b.top
            ]
            found = [d for a, b in pairs for d in differences(a, b)]
            if found:
                results.append(
                    LogitResult(
                        scenario=scenario,
                        candidate=candidate,
                        control=control,
                        items=len(pairs),
                        tokens=len(found),
                        vocabulary=pairs[0][0].vocabulary,
                        max_abs=max(found),
                        mean_abs=sum(found) / len(found),
                        argmax_equal=sum(a.top[0][0] == b.top[0][0] for a, b in pairs),
                        histogram=_histogram(found),
                    )
                )
    return results


def _histogram(values: Sequence[float], bins: int = 24) -> list[tuple[float, float, int]]:
    top = max(values) or 1e-9
    counts = [0] * bins
    for value in values:
        counts[min(bins - 1, int(value / top * bins))] += 1
    return [(i * top / bins, (i + 1) * top / bins, count) for i, count in enumerate(counts)]


def quality(samples: Samples, arms: Sequence[str]) -> list[QualityResult]:
    results = []
    for scenario in _scenarios(samples, "quality"):
        for control, candidate in arm_pairs(arms):
            pairs = [
                (a, b)
                for a, b in matched_requests(samples, scenario, control, candidate)
                if a.correct is not None and b.correct is not None
            ]
            samplings = sorted({sampling_of(a) for a, _ in pairs})
            cells = sorted({a.cell for a, _ in pairs}, key=lambda c: (len(c), c))
            for sampling in samplings:
                for cell in [*cells, "pooled"] if len(cells) > 1 else cells:
                    chosen = [
                        (a, b) for a, b in pairs if sampling_of(a) == sampling and cell in (a.cell, "pooled")
                    ]
                    if chosen:
                        results.append(_quality(scenario, cell, sampling, candidate, control, chosen))
    return results


def sampling_of(request: Request) -> str:
    """``<scenario>/<depth>/<sampling>/...``"""
    return request.item.split("/")[2]


def question_of(request: Request) -> str:
    """The question without its seed: depth, sampling and the question's name within a document."""
    parts = request.item.split("/")
    return "/".join([parts[1], parts[-1]])


def _quality(
    scenario: str,
    cell: str,
    sampling: str,
    candidate: str,
    control: str,
    pairs: Sequence[tuple[Request, Request]],
) -> QualityResult:
    answers = [(bool(a.correct), bool(b.correct)) for a, b in pairs]
    table: Matched = matched(answers)
    processes = len({b.process for _, b in pairs})
    low, high = matched_interval(table)
    worse: dict[str, int] = {}
    for a, b in pairs:
        if a.correct and not b.correct:
            worse[question_of(a)] = worse.get(question_of(a), 0) + 1
    return QualityResult(
        scenario=scenario,
        cell=cell,
        sampling=sampling,
        candidate=candidate,
        control=control,
        processes=processes,
        n=table.n,
        control_right=table.both + table.lost,
        candidate_right=table.both + table.won,
        lost=table.lost,
        won=table.won,
        p=table.p,
        low=low,
        high=high,
        verdict=matched_verdict(table, processes=processes),
        worse_questions=worse,
    )

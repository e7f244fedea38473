"""The cache does not change what the model computes.

Merge mode (a test switch) adds hits and misses lane by lane in the order of the stock graph: on virtual
GPUs, where both run the same kernels, the logits are equal to the byte. Production adds two partial sums:
equal up to the rounding of that sum.
"""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from conftest import NativeBuild
from expert_cache_runs import Arm, model, run, virtual_gpus

pytestmark = pytest.mark.native

TYPES = ("mix", "q4_k", "q5_k", "q5_1", "q8_0", "f16", "bf16")
SLOTS = ("1", "16", "150", "all")
DEVICES = (1, 2, 3)
INSERTS = (1, 2, 4)
AXES: tuple[tuple[object, ...], ...] = (TYPES, SLOTS, DEVICES, INSERTS)
# every size of batch in each type of expert: a type has four cases or more, and each takes every fourth size
BATCHES = tuple("1x4," + ",".join(f"{n}x2" for n in range(first, 33, 4)) for first in (1, 2, 3, 4))


def pairwise(axes: tuple[tuple[object, ...], ...]) -> Iterator[tuple[object, ...]]:
    """Cases in which every pair of values of two axes occurs, greedily and always the same."""
    pairs = {
        (i, a, j, b)
        for i, j in itertools.combinations(range(len(axes)), 2)
        for a, b in itertools.product(axes[i], axes[j])
    }

    def covered(case: tuple[object, ...]) -> set[tuple[int, object, int, object]]:
        return {(i, case[i], j, case[j]) for i, j in itertools.combinations(range(len(axes)), 2)}

    everything = list(itertools.product(*axes))
    while pairs:
        best = max(everything, key=lambda case: len(covered(case) & pairs))
        yield best
        pairs -= covered(best)


def slots_of(name: str, experts: int) -> int:
    return experts if name == "all" else min(int(name), experts)


Models = Callable[[str, str], Path]


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    """Models by kind and expert type, each written once."""

    @functools.cache
    def get(kind: str, expert_type: str) -> Path:
        folder = tmp_path_factory.mktemp(f"{kind}-{expert_type}")
        return model(kind, folder, None if expert_type == "mix" else expert_type)

    return get


def assert_books(arm: Arm, *, layers: int, used: int) -> None:
    counters = arm.counters
    assert counters["hits"] + counters["misses"] == counters["tokens"] * layers * used
    assert counters["cpu_rows"] == counters["misses"]


def cases() -> list[tuple[object, ...]]:
    """The pairwise cases, each with its batches."""
    seen: Counter[object] = Counter()
    found = []
    for case in pairwise(AXES):
        found.append((*case, BATCHES[seen[case[0]] % len(BATCHES)]))
        seen[case[0]] += 1
    assert min(seen.values()) >= len(BATCHES)
    return found


@pytest.mark.parametrize("case", cases(), ids=lambda case: "-".join(map(str, case[:-1])))
def test_merged_logits_are_equal_to_the_byte(
    case: tuple[str, str, int, int, str], native_build: NativeBuild, models: Models, tmp_path: Path
) -> None:
    expert_type, slots, devices, inserts, batches = case
    kind, experts, layers, used = ("demo", 512, 8, 10) if slots == "150" else ("tiny", 32, 8, 4)
    gguf = models(kind, expert_type)
    with virtual_gpus(native_build.bin, tmp_path, devices) as endpoints:
        arm = f"slots={slots_of(slots, experts)},inserts={inserts},merge=1"
        off, on = run(
            native_build.bin, gguf, endpoints, tmp_path, batches, ["slots=0", arm], "--repeat", "40"
        )
    assert on.counters["n_devices"] == devices
    assert on.counters["hits"] > 0
    assert_books(on, layers=layers, used=used)
    assert off.logits is not None and on.logits is not None
    assert off.logits.tobytes() == on.logits.tobytes()


@pytest.mark.parametrize("kind", ["tiny", "demo"])
def test_two_hundred_steps_are_equal_to_the_byte(
    kind: str, native_build: NativeBuild, models: Models, tmp_path: Path
) -> None:
    """Greedy text, so that the routing is the model's own; also with late uploads into poisoned slots, and
    across a release and restore."""
    gguf = models(kind, "mix")
    slots = 16 if kind == "tiny" else 150
    arms = [
        "slots=0",
        f"slots={slots},merge=1",
        f"slots={slots},merge=1,late=2",
        f"slots={slots},merge=1,release_at=100",
        f"slots={slots},merge=1,bypass_at=100",
    ]
    with virtual_gpus(native_build.bin, tmp_path, 2) as endpoints:
        off, *others = run(native_build.bin, gguf, endpoints, tmp_path, "1x200", arms, "--greedy")
    assert off.logits is not None
    for arm in others:
        assert arm.logits is not None and arm.logits.tobytes() == off.logits.tobytes()
        assert arm.counters["hits"] > 0
    assert others[2].counters["generation"] == 2
    # what was in the slots before the release is in them after the restore
    assert others[2].counters["hits"] == others[0].counters["hits"]


def test_worker_threads_and_another_context_change_nothing(
    native_build: NativeBuild, models: Models, tmp_path: Path
) -> None:
    """Misses on several threads; and a second context of the same model with a cache of its own, decoding
    other text in between: neither the logits nor the hits of the first one move."""
    gguf = models("tiny", "mix")
    arms = ["slots=0", "slots=12,merge=1", "slots=12,merge=1,spin=50", "slots=12,merge=1,twin=5"]
    with virtual_gpus(native_build.bin, tmp_path, 2) as endpoints:
        options = ("--threads", "3", "--repeat", "16")
        off, *others = run(native_build.bin, gguf, endpoints, tmp_path, "1x40,5x8,32x2", arms, *options)
    assert off.logits is not None
    for arm in others:
        assert arm.logits is not None and arm.logits.tobytes() == off.logits.tobytes()
        assert arm.counters["hits"] == others[0].counters["hits"] > 0
        assert arm.counters["cpu_rows"] == arm.counters["misses"] == others[0].counters["misses"]
        assert arm.counters["capacity"] == 12 * 8


def test_a_batch_over_the_limit_takes_the_stock_path(
    native_build: NativeBuild, models: Models, tmp_path: Path
) -> None:
    gguf = models("tiny", "mix")
    with virtual_gpus(native_build.bin, tmp_path, 1) as endpoints:
        off, on = run(
            native_build.bin,
            gguf,
            endpoints,
            tmp_path,
            "1x4,33x2,32x1,64x1,1x4",
            ["slots=0", "slots=16,merge=1"],
        )
    assert on.counters["steps"] == 9
    # the last layer of a large batch has few rows when few outputs are asked for: still not the cache's
    assert on.counters["hits"] + on.counters["misses"] == (4 + 32 + 4) * 8 * 4
    assert off.logits is not None and on.logits is not None
    assert off.logits.tobytes() == on.logits.tobytes()


def test_two_partial_sums_differ_by_the_rounding_of_a_sum(
    native_build: NativeBuild, models: Models, tmp_path: Path
) -> None:
    """Production against stock in layer 0, whose input is the same in both: two orders of a sum of n terms
    differ by at most 2(n-1)u times the sum of their magnitudes, u = 2**-24."""
    gguf = models("demo", "mix")
    names = ("ffn_moe_out-0", "ffn_moe_weighted-0")
    nodes = [option for name in names for option in ("--node", name)]
    with virtual_gpus(native_build.bin, tmp_path, 1) as endpoints:
        arms = [f"slots=0,nodes={tmp_path}/off-", f"slots=150,nodes={tmp_path}/on-"]
        run(native_build.bin, gguf, endpoints, tmp_path, "1x60,4x20", arms, "--repeat", "20", *nodes)
    lanes = np.fromfile(tmp_path / "off-ffn_moe_weighted-0", np.float32).reshape(-1, 10, 256)
    off = np.fromfile(tmp_path / "off-ffn_moe_out-0", np.float32).reshape(-1, 256)
    on = np.fromfile(tmp_path / "on-ffn_moe_out-0", np.float32).reshape(-1, 256)
    bound = 2 * (10 - 1) * 2.0**-24 * np.abs(lanes.astype(np.float64)).sum(axis=1)
    difference = np.abs(on.astype(np.float64) - off)
    assert np.abs(off).max() > 0
    assert (difference > 0).any(), "the two orders never differed: nothing was compared"
    assert (difference <= bound).all(), (difference / bound).max()


def top_two_gap(row: np.ndarray) -> float:  # type: ignore[type-arg]
    second, first = np.partition(row, -2)[-2:]
    return float(first - second)


@pytest.mark.parametrize("kind", ["tiny", "demo"])
def test_production_text_diverges_only_at_ties(
    kind: str, native_build: NativeBuild, models: Models, tmp_path: Path
) -> None:
    """The yardstick is what a change of the batch's shape alone does to a logit, measured on the stock graph.
    Two logits that move by as much can change places where they are at most twice that apart."""
    gguf = models(kind, "mix")
    slots = 16 if kind == "tiny" else 150
    with virtual_gpus(native_build.bin, tmp_path, 2) as endpoints:
        one, *others = (
            run(native_build.bin, gguf, endpoints, tmp_path, schedule, ["slots=0"])[0].logits
            for schedule in ("1x128", "2x64", "4x32", "8x16")
        )
        arms = ["slots=0", f"slots={slots}"]
        off, on = (
            arm.logits for arm in run(native_build.bin, gguf, endpoints, tmp_path, "1x200", arms, "--greedy")
        )
    assert one is not None and off is not None and on is not None
    shape_bound = max(float(np.abs(one - other).max()) for other in others if other is not None)
    assert shape_bound > 0
    same = off.argmax(axis=1) == on.argmax(axis=1)
    first = int(np.argmin(same)) if not same.all() else len(same)
    moved = float(np.abs(off[:first] - on[:first]).max())
    print(
        f"{kind}: batch shape {shape_bound:.4f}, cache {moved:.4f}, first divergence {first} of {len(same)}"
    )
    assert moved <= 2 * shape_bound
    if first < len(same):
        assert top_two_gap(off[first]) <= 2 * shape_bound


def test_one_wrong_byte_in_a_slot_is_seen(native_build: NativeBuild, models: Models, tmp_path: Path) -> None:
    """The comparisons above can fail: the same run with one byte of an upload inverted has other logits."""
    gguf = models("tiny", "mix")
    arms = ["slots=0", "slots=24,merge=1"]
    with virtual_gpus(native_build.bin, tmp_path, 1) as endpoints:
        off, on = run(native_build.bin, gguf, endpoints, tmp_path, "1x40", arms, "--repeat", "8")
    assert off.logits is not None and on.logits is not None
    assert off.logits.tobytes() == on.logits.tobytes()

    wrong = 0
    for nth in (400, 700, 1000):  # writes to the device: inputs of splits, and slots
        with virtual_gpus(native_build.bin, tmp_path, 1, "--fault", f"upload-corrupt:{nth}") as endpoints:
            (bad,) = run(native_build.bin, gguf, endpoints, tmp_path, "1x40", arms[1:], "--repeat", "8")
        assert bad.logits is not None
        wrong += bad.logits.tobytes() != off.logits.tobytes()
    assert wrong > 0

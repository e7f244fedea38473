"""The cache follows its rules: a plain LRU replays the routing and predicts lanes, uploads, evictions."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import NativeBuild
from expert_cache_reference import LayerLru, read_dump, write_trace
from expert_cache_runs import model, run, virtual_gpus
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

pytestmark = [pytest.mark.native, pytest.mark.slow, pytest.mark.timeout(600)]

LAYERS, EXPERTS, USED = 8, 32, 4
STEPS = 500  # per example, and ten examples: five thousand


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model("tiny", tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def endpoints(native_build: NativeBuild, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with virtual_gpus(native_build.bin, tmp_path_factory.mktemp("gpus"), 2) as endpoints:
        yield endpoints


def routing(pattern: str, tokens: int, seed: int) -> list[list[list[int]]]:
    """[token][layer][lane]. uniform: no locality; hot: a drifting working set; cycle: the worst of an LRU."""
    rng = random.Random(seed)
    rows = []
    for token in range(tokens):
        layers = []
        for layer in range(LAYERS):
            if pattern == "cycle":
                start = (token * USED + layer) % EXPERTS
                row = [(start + k) % EXPERTS for k in range(USED)]
            elif pattern == "hot":
                base = token // 20
                pool = [(base + layer + k) % EXPERTS for k in range(2 * USED)]
                row = rng.sample(pool, USED - 1)
                row.append(rng.choice([e for e in range(EXPERTS) if e not in row]))
                rng.shuffle(row)
            else:
                row = rng.sample(range(EXPERTS), USED)
            layers.append(row)
        rows.append(layers)
    return rows


@settings(
    max_examples=10,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    pattern=st.sampled_from(["uniform", "hot", "cycle"]),
    slots=st.integers(1, EXPERTS),
    inserts=st.integers(1, 4),
    batches=st.lists(st.sampled_from([1, 1, 1, 2, 4, 7]), min_size=1, max_size=5),
    seed=st.integers(0, 2**16),
)
def test_an_lru_in_python_predicts_every_step(
    pattern: str,
    slots: int,
    inserts: int,
    batches: list[int],
    seed: int,
    native_build: NativeBuild,
    tiny: Path,
    endpoints: str,
    tmp_path: Path,
) -> None:
    share = STEPS // len(batches)
    schedule = ",".join(f"{batch}x{share}" for batch in batches)
    tokens = share * sum(batches)
    rows = routing(pattern, tokens, seed)
    trace = write_trace(tmp_path / "trace.bin", rows)
    dump = tmp_path / "dump.jsonl"
    arm = f"slots={slots},inserts={inserts},routing={trace},dump={dump}"
    (result,) = run(native_build.bin, tiny, endpoints, tmp_path, schedule, [arm], "--ctx", "16384")

    geometry, lines = read_dump(dump)
    assert geometry["n_slots"] == slots and geometry["n_inserts"] == inserts
    assert len(lines) == share * len(batches) * LAYERS

    layers = [LayerLru(slots, inserts) for _ in range(LAYERS)]
    token = hits = misses = uploads = 0
    for i in range(0, len(lines), LAYERS):
        step = lines[i : i + LAYERS]
        count = step[0]["n_tokens"]
        for line, layer in zip(step, layers, strict=True):
            ids = [expert for row in rows[token : token + count] for expert in row[line["layer"]]]
            assert line["ids"] == ids
            lanes, expected = layer.step(ids)
            assert line["hits"] == [int(slot >= 0) for slot in lanes]
            assert all(want in (-1, got) for want, got in zip(lanes, line["slots"], strict=True))
            assert line["inserts"] == expected
            writing = {slot for _, slot, _ in expected}
            for k in range(0, len(ids), USED):
                row_slots = line["slots"][k : k + USED]
                assert len(set(row_slots)) == USED
                assert not writing & set(row_slots)
            hits += sum(line["hits"])
            misses += len(ids) - sum(line["hits"])
            uploads += len(expected)
        token += count
    assert token == tokens
    assert (result.counters["hits"], result.counters["misses"]) == (hits, misses)
    # the uploads of the last step may not have been counted when the run ended
    assert result.counters["uploads"] == uploads
    assert result.counters["cpu_rows"] == misses


def test_the_override_routes_the_stock_graph_too(
    native_build: NativeBuild, tiny: Path, endpoints: str, tmp_path: Path
) -> None:
    """Both arms of a comparison see the same synthetic routing, which is not what the router would do."""
    trace = write_trace(tmp_path / "trace.bin", routing("hot", 40, 1))
    arms = ["slots=0", f"slots=0,routing={trace}", f"slots=8,merge=1,routing={trace}"]
    free, off, on = run(native_build.bin, tiny, endpoints, tmp_path, "1x40", arms)
    assert free.logits is not None and off.logits is not None and on.logits is not None
    assert off.logits.tobytes() == on.logits.tobytes()
    assert off.logits.tobytes() != free.logits.tobytes()

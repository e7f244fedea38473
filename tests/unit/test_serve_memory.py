"""Host memory is counted from the tensor table, and a shortage is told with all its numbers."""

from __future__ import annotations

import pytest

from flashnext.errors import HostMemoryError
from flashnext.model.inspect import Tensor
from flashnext.probe.host import HostFacts
from flashnext.profile import load
from flashnext.serve import memory

GIB = 1024**3


def tensor(name: str, size_bytes: int) -> Tensor:
    return Tensor(name=name, shape=(1,), type="Q4_K", size_bytes=size_bytes, file="x.gguf")


# As the published files have it: 77 GB of experts, a table of 29 GB, some 6 GB of the rest.
REAL = [
    *(
        tensor(f"blk.{n}.ffn_{kind}_exps.weight", 535 * 1024**2)
        for n in range(48)
        for kind in ("gate", "up", "down")
    ),
    tensor("per_layer_token_embd.weight", 28_800_138_240),
    tensor("token_embd.weight", 675_430_400),
    tensor("blk.0.attn_q.weight", 5 * GIB),
]


def available(monkeypatch: pytest.MonkeyPatch, size_bytes: int) -> None:
    facts = HostFacts(cores=2, total_bytes=size_bytes, available_bytes=size_bytes, cgroup_limit_bytes=None)
    monkeypatch.setattr(memory, "probe_host", lambda: facts)


def test_a_machine_of_23_gib_is_refused_with_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    available(monkeypatch, 23 * GIB)
    (error,) = memory.problems(load.load("2x3090"), REAL)
    assert isinstance(error, HostMemoryError) and error.exit_code == 4
    assert error.context[-1] == "   87.23 GiB  needed, 23.00 available, 64.23 short"
    assert any(
        "26.82 GiB  tensors per_layer_token_embd" in line and "paged out" in line for line in error.context
    )
    assert "ffn_(gate|up|down)_exps" in error.advice


def test_a_machine_with_room_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    available(monkeypatch, 88 * GIB)
    assert list(memory.problems(load.load("2x3090"), REAL)) == []


def test_virtual_gpus_live_in_host_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = memory.shares(load.load("demo").profile, [tensor("a", 7), tensor("blk.0.ffn_up_exps.weight", 9)])
    sizes = {p.name.split()[0]: (p.size_bytes, p.locked) for p in parts}
    assert sizes["weights"] == (7, True)
    assert sizes["tensors"] == (9, False), "mapped experts can be paged out"

"""One MTP step in the graph against numpy float64.

The weights are F32: quantised activations would hide errors of a percent. What is left is the rounding of
float32 sums, about 1e-6 of values up to 5; the two norm groupings, for comparison, are 1e-2 apart.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mtp_models import Models
from mtp_reference import Dump, Head, read_dump, step
from mtp_server import run_test_program

pytestmark = pytest.mark.native
TOLERANCE = 2e-5


def run_step(
    bin_dir: Path, trunk: Path, head: Path, out: Path, tokens: int, quiet: int = 0, hnorm: str | None = None
) -> Dump:
    env = {} if hnorm is None else {"FN_MTP_HNORM": hnorm}
    run_test_program(bin_dir, "step", trunk, head, str(tokens), "64", str(quiet), out, env=env)
    return read_dump(out)


def errors(got: Dump, head: Head, whole_row: bool) -> tuple[Any, Any, Any]:
    """Per row: largest error of residual and logits; and whether the row is determined (see `selection`)."""
    residual, logits, certain = step(head, got.tokens, got.hidden, whole_row)
    rows = certain & ~np.isnan(got.residual[:, 0])
    return np.abs(residual - got.residual).max(axis=1), np.abs(logits - got.logits).max(axis=1), rows


def with_top_k(head: Path, out: Path, top_k: int) -> Path:
    """A copy of a head file that selects top_k tokens, as the real model does."""
    data = bytearray(shutil.copy(head, out).read_bytes())
    key = b"qwen4exp.attention.indexer.top_k"
    at = data.index(key) + len(key) + 4  # behind the value's type
    data[at : at + 4] = top_k.to_bytes(4, "little")
    out.write_bytes(data)
    return out


@pytest.mark.parametrize("hnorm", ["stream", "row"])
@pytest.mark.parametrize("ratio", [0, 4], ids=["dense", "sparse"])
def test_step_matches_numpy(
    native_build: Any, mtp_models: Models, tmp_path: Path, ratio: int, hnorm: str
) -> None:
    trunk, head_path = f32_pair(mtp_models, ratio)
    head = Head(head_path)
    got = run_step(native_build.bin, trunk, head_path, tmp_path / "dump", 120, hnorm=hnorm)
    residual, logits, rows = errors(got, head, whole_row=hnorm == "row")
    assert rows.sum() >= 30
    assert residual[rows].max() < TOLERANCE
    assert logits[rows].max() < TOLERANCE
    # the other grouping is another result: the switch does something, and the tolerance tells them apart
    _, other, _ = errors(got, head, whole_row=hnorm != "row")
    assert other[rows].max() > 20 * TOLERANCE


def test_grouping_is_per_stream_by_default(native_build: Any, mtp_models: Models, tmp_path: Path) -> None:
    trunk, head_path = f32_pair(mtp_models, 0)
    got = run_step(native_build.bin, trunk, head_path, tmp_path / "dump", 40)
    residual, _, rows = errors(got, Head(head_path), whole_row=False)
    assert residual[rows].max() < TOLERANCE


def test_unknown_grouping_is_an_error(native_build: Any, mtp_models: Models, tmp_path: Path) -> None:
    trunk, head_path = f32_pair(mtp_models, 0)
    with pytest.raises(subprocess.CalledProcessError) as failed:
        run_step(native_build.bin, trunk, head_path, tmp_path / "dump", 40, hnorm="streams")
    assert "FN_MTP_HNORM must be 'stream' or 'row'" in failed.value.stderr


@pytest.mark.parametrize("ratio", [0, 4], ids=["dense", "sparse"])
def test_catch_up_without_outputs_fills_the_same_cache(
    native_build: Any, mtp_models: Models, tmp_path: Path, ratio: int
) -> None:
    trunk, head_path = f32_pair(mtp_models, ratio)
    got = run_step(native_build.bin, trunk, head_path, tmp_path / "dump", 192, quiet=128)
    assert np.isnan(got.residual[:128]).all()
    residual, logits, rows = errors(got, Head(head_path), whole_row=False)
    assert rows.sum() >= 10
    assert residual[rows].max() < TOLERANCE
    assert logits[rows].max() < TOLERANCE


@pytest.mark.slow
def test_sparse_equals_dense_up_to_2051_tokens(native_build: Any, mtp_models: Models, tmp_path: Path) -> None:
    """With the real top_k of 2,048."""
    trunk, sparse = f32_pair(mtp_models, 4)
    _, dense = f32_pair(mtp_models, 0)
    head_path = with_top_k(sparse, tmp_path / "sparse.gguf", 2048)
    got = run_step(native_build.bin, trunk, head_path, tmp_path / "sparse", 2112, quiet=1984)
    plain = run_step(native_build.bin, trunk, dense, tmp_path / "dense", 2112, quiet=1984)
    apart = np.abs(got.residual - plain.residual).max(axis=1)
    assert apart[1984:2051].max() < TOLERANCE
    assert apart[2055:].max() > 20 * TOLERANCE


@pytest.mark.slow
def test_sparse_matches_numpy_beyond_2051_tokens(
    native_build: Any, mtp_models: Models, tmp_path: Path
) -> None:
    """A selection of about half the context: its last block has a score above 0 on many rows."""
    trunk, sparse = f32_pair(mtp_models, 4)
    head_path = with_top_k(sparse, tmp_path / "sparse.gguf", 1024)
    got = run_step(native_build.bin, trunk, head_path, tmp_path / "dump", 2240, quiet=2048)
    residual, logits, rows = errors(got, Head(head_path), whole_row=False)
    assert rows.sum() >= 20
    assert residual[rows].max() < TOLERANCE
    assert logits[rows].max() < TOLERANCE


def test_trunk_exports_a_row_per_token(native_build: Any, mtp_models: Models) -> None:
    """Equal to the bit for every way of asking, and not what a later node left in their memory."""
    said = run_test_program(native_build.bin, "export", mtp_models.trunk())
    assert "export: 48 rows of 1024" in said


def test_borrowed_tensors_compute_what_own_ones_do(
    native_build: Any, mtp_models: Models, tmp_path: Path
) -> None:
    trunk = mtp_models.trunk()
    own = run_step(native_build.bin, trunk, mtp_models.head("standalone"), tmp_path / "own", 40)
    borrowed = run_step(native_build.bin, trunk, mtp_models.head("shared"), tmp_path / "borrowed", 40)
    assert np.array_equal(own.logits, borrowed.logits)
    assert np.array_equal(own.residual, borrowed.residual)


def f32_pair(models: Models, ratio: int) -> tuple[Path, Path]:
    """A trunk (it only supplies hidden rows) and a standalone head of F32 tensors."""
    return models.trunk(), models.head("standalone", head_type="f32", head_ratio=ratio)

"""Every rule of the pinned loader, found before anything is launched."""

from __future__ import annotations

from pathlib import Path

import pytest
from model_variants import ABORTING, ACCEPTED, REFUSED, Case, draft

from flashnext.errors import ModelProblemsError, all_errors
from flashnext.model.inspect import inspect_model
from flashnext.model.problems import KINDS


def _inspect(case: Case, folder: Path) -> list[tuple[str, bool]]:
    file = draft()
    case.change(file)
    found = inspect_model(file.write(folder / "model.gguf"))
    for problem in found.problems:
        assert problem.hint.strip()
        assert "model.gguf" in problem.message
    return [(problem.id, problem.aborts) for problem in found.problems]


@pytest.mark.parametrize("case", REFUSED, ids=str)
def test_what_the_loader_refuses_is_named(case: Case, tmp_path: Path) -> None:
    found = _inspect(case, tmp_path)
    assert {kind for kind, _ in found} == set(case.ids)


@pytest.mark.parametrize("case", ABORTING, ids=str)
def test_what_the_loader_aborts_on_is_named_and_marked(case: Case, tmp_path: Path) -> None:
    found = _inspect(case, tmp_path)
    assert {kind for kind, _ in found} == set(case.ids)
    assert all(aborts for _, aborts in found)


@pytest.mark.parametrize("case", ACCEPTED, ids=str)
def test_what_the_loader_accepts_has_no_problem(case: Case, tmp_path: Path) -> None:
    assert _inspect(case, tmp_path) == []


def test_all_problems_come_in_one_error(tmp_path: Path) -> None:
    file = draft()
    file.drop("context_length")
    file.u32("ssm.inner_size", 7)
    found = inspect_model(file.write(tmp_path / "model.gguf"))
    with pytest.raises(ModelProblemsError) as caught:
        found.raise_for_problems()
    assert caught.value.exit_code == 4
    assert [line.split("]")[0] for line in caught.value.context] == ["[model-key-missing", "[model-ssm-sizes"]


def test_problem_ids_do_not_collide_with_errors() -> None:
    errors = {cls.id for cls in all_errors()}
    assert set(KINDS) & errors == {"model-header-broken"}  # the one that is raised as an error as well


def test_no_rotation_at_all_would_hang(tmp_path: Path) -> None:
    """The server never becomes ready on it, so no native test holds this row."""
    file = draft()
    file.u32("rope.dimension_count", 0)
    found = inspect_model(file.write(tmp_path / "model.gguf"))
    assert [problem.id for problem in found.problems] == ["model-rope-dims"]

"""Without the extra the error names it; without a plot or an interval nothing of it is imported."""

import subprocess
import sys

import pytest

from flashnext.bench.extra import PACKAGES, check_extra
from flashnext.bench.stats import Pair, paired_ratio
from flashnext.errors import BenchExtraMissingError

HEAVY = ("scipy", "matplotlib", "jinja2", "httpx_sse")


def test_importing_the_bench_imports_none_of_the_extra() -> None:
    code = (
        "import importlib, pkgutil, sys, flashnext.bench, flashnext.cli.bench\n"
        "[importlib.import_module(m.name) for m in pkgutil.iter_modules(flashnext.bench.__path__,"
        " 'flashnext.bench.')]\n"
        f"print([n for n in {HEAVY!r} if n in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_missing_package_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "scipy", None)
    with pytest.raises(BenchExtraMissingError, match="scipy") as caught:
        paired_ratio([Pair(k % 2 == 0, 1.0, 1.0 + k) for k in range(4)])
    assert "'.[bench]'" in caught.value.advice
    assert caught.value.exit_code == 2


@pytest.mark.parametrize("name", PACKAGES)
def test_it_is_missed_before_anything_is_measured(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    check_extra()
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(BenchExtraMissingError, match=name) as caught:
        check_extra()
    assert caught.value.context == ("nothing was started",)

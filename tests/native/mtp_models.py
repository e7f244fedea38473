"""Tiny qwen4exp trunks with heads in every form, written once per session."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Literal

from flashnext.model.synth import SynthRequest, SynthResult, synthesise

Form = Literal["shared", "standalone", "embedded"]


class Models:
    """Writes what a test asks for, once. Equal seeds give equal trunks; heads of other seeds fit them too."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._made = cache(self._make)

    def _make(
        self, form: Form | None, seed: int, markov: bool, head_type: str, head_ratio: int
    ) -> SynthResult:
        name = f"{form}-{seed}-{markov}-{head_type}-{head_ratio}"
        request = SynthRequest(
            kind="tiny", out=self.folder / name, mtp=form, seed=seed, markov=markov,
            head_type=head_type, head_ratio=head_ratio,
        )  # fmt: skip
        return synthesise(request, lambda total: None, lambda n: None)

    def trunk(self, seed: int = 0, markov: bool = False) -> Path:
        return self._made(None, seed, markov, "q8_0", 0).model

    def head(
        self,
        form: Form = "shared",
        seed: int = 0,
        markov: bool = False,
        head_type: str = "q8_0",
        head_ratio: int = 0,
    ) -> Path:
        made = self._made(form, seed, markov, head_type, head_ratio).head
        assert made is not None, "an embedded head has no file of its own"
        return made

    def embedded(self, seed: int = 0, markov: bool = False, head_type: str = "q8_0") -> Path:
        return self._made("embedded", seed, markov, head_type, 0).model

    def shards(self) -> list[Path]:
        """A trunk in two files."""
        request = SynthRequest(kind="tiny", out=self.folder / "shards", shards=2)
        return sorted(synthesise(request, lambda total: None, lambda n: None).files)

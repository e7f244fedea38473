"""The service's record while it runs: state.json, written on every change and at most every two seconds."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping
from typing import Any

from flashnext import services
from flashnext.artefacts import write_json
from flashnext.serve.chunk import told
from flashnext.serve.logfile import LogFile
from flashnext.serve.plan import Plan
from flashnext.serve.prober import Slots
from flashnext.serve.states import State
from flashnext.serve.timings import PromptProgress
from flashnext.services import Process, Service, Transition

_EVERY_S = 2.0
_KEEP = 50
_LOG_LOST = "the log cannot be written"


class Recorder:
    """Holds the current record. Called from the supervisor's thread alone."""

    def __init__(self, plan: Plan, log: LogFile) -> None:
        profile = plan.loaded.profile
        self._log = log
        self._file = services.state_file(plan.place.port)
        self._written = 0.0
        self._dirty = False
        self._cached = 0
        self.service = Service(
            profile=profile.name,
            kind=profile.kind,
            profile_file=str(plan.loaded.file),
            port=plan.place.port,
            url=plan.url,
            state=State.STOPPED,
            reason="",
            started=services.now(),
            supervisor=services.this_process(),
            build=plan.build_key,
            features=plan.build_features,
            model=plan.place.model,
            head=plan.place.head,
            deviations=tuple(f"{plan.loaded.place(d.path)}: {d.text()}" for d in plan.loaded.deviations),
            warnings=plan.warnings,
            log=str(plan.log),
        )

    @property
    def children(self) -> tuple[Process, ...]:
        return self.service.children

    def transition(self, state: State, reason: str) -> None:
        entry = Transition(at=services.now(), state=state, reason=reason)
        history = (*self.service.transitions, entry)[-_KEEP:]
        last = tuple(self._log.tail()) if state in (State.FATAL, State.BACKOFF) else self.service.last_lines
        self.update(state=str(state), reason=reason, transitions=history, last_lines=last)

    def update(self, **values: Any) -> None:
        """Change fields and write."""
        self.service = self.service.model_copy(update=values)
        self._write()

    def count(self, name: str) -> None:
        counters = dict(self.service.counters)
        counters[name] = counters.get(name, 0) + 1
        self._later(counters)

    def gauge(self, name: str, value: float) -> None:
        self._later({**self.service.counters, name: value})

    def lean(self, data: Mapping[str, Any]) -> None:
        """Lean prefill said which chunk it took."""
        chunk = data.get("chunk")
        self.gauge("lean_chunk", chunk if isinstance(chunk, int) else 0)
        self.gauge("lean_lent", int(bool(data.get("lent"))))
        self.update(lean=told(data))

    def activity(self, slots: Slots) -> None:
        """What the server is doing now: reading a prompt, or writing."""
        self._cached = slots.cached
        if "prompt_share" in self.service.counters and (not slots.busy or slots.written):
            self._later({k: v for k, v in self.service.counters.items() if not k.startswith("prompt_")})
        now = {
            "busy": int(slots.busy),
            "read": slots.read,
            "written": slots.written,
        }
        if any(self.service.counters.get(name) != value for name, value in now.items()):
            self._later({**self.service.counters, **now})
        elif self._dirty and time.monotonic() - self._written >= _EVERY_S:
            self._write()

    def reading(self, prompt: PromptProgress) -> None:
        """A log line told how far the prompt is, how long it is, and when it will be read."""
        told = {
            "prompt_share": prompt.share,
            "prompt_tokens": prompt.tokens(self._cached),
            "prompt_left_s": round(prompt.left_s(self._cached), 1),
        }
        self._later({**self.service.counters, **told})

    def warn(self, text: str, *, key: str = "") -> None:
        """Show a warning; a later one that begins with the same ``key`` takes its place."""
        if text not in self.service.warnings:
            kept = tuple(w for w in self.service.warnings if not key or not w.startswith(key))
            self.update(warnings=(*kept, text))

    def end(self) -> None:
        """The last word; the record stays for `flashnext status`."""
        self.update(children=())

    def _later(self, counters: dict[str, int | float]) -> None:
        self.service = self.service.model_copy(update={"counters": counters})
        self._dirty = True
        if time.monotonic() - self._written >= _EVERY_S:
            self._write()

    def _write(self) -> None:
        self._written = time.monotonic()
        self._dirty = False
        if self._log.lost:
            kept = tuple(w for w in self.service.warnings if not w.startswith(_LOG_LOST))
            told = f"{_LOG_LOST}: {self._log.lost} lines are lost; is the disk full?"
            self.service = self.service.model_copy(update={"warnings": (*kept, told)})
        # a full disk must not end a server that works
        with contextlib.suppress(OSError):
            write_json(self._file, self.service)

"""The supervisor: one owner of the service's state, in one thread, fed by one queue.

Readers and the prober only post events. Every decision and every change of state happens in :meth:`run`.
"""

from __future__ import annotations

import os
import queue
import resource
import signal
import time
from collections.abc import Callable
from types import FrameType

from flashnext import failures, markers
from flashnext.errors import FlashnextError
from flashnext.failures import Action, Finding, ending
from flashnext.probe.host import oom_kills
from flashnext.proc import is_nohup
from flashnext.profile.fit import CARD_RESERVE, mib
from flashnext.serve import host, prober, record, transaction
from flashnext.serve.child import Child
from flashnext.serve.control import Control
from flashnext.serve.endings import Trouble, error_for
from flashnext.serve.events import Ended, Event, StopSignal
from flashnext.serve.logfile import LogFile
from flashnext.serve.notify import Notifier
from flashnext.serve.plan import Plan
from flashnext.serve.states import State, check_transition
from flashnext.serve.timings import ACCEPTANCE_LOW, DRAFTS_ENOUGH, Acceptance, Drafts, PromptProgress

_TICK_S = 0.2
_VGPU_START_S = 20.0
_MOVING_S = 30.0  # a load that said something so recently is under way
_REHEARSAL_S = 5.0  # from the last ready check to the markers of the rehearsal, which came before it
_DYING_S = 5.0  # from a fatal log line to the end that should follow it
_BACKOFF_MAX_S = 60.0
_HELD_S = 90.0  # how long a restart waits for devices or a port that another process holds
_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_ENDS = (State.STOPPED, State.FATAL)


class Supervisor:
    """Runs one plan until it is told to stop or cannot go on.

    ``on_change`` is called after every change of state (for people), ``on_line`` with the server's own lines.
    """

    def __init__(
        self,
        plan: Plan,
        *,
        on_change: Callable[[State, str], None] = lambda state, reason: None,
        on_line: Callable[[Child, str], None] | None = None,
    ) -> None:
        self.plan = plan
        self.life = plan.loaded.profile.life
        self.state = State.STOPPED
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._on_change, self._on_line = on_change, on_line
        self._log = LogFile(plan.log)
        self._record = record.Recorder(plan, self._log)
        self._notify = Notifier()
        self._error: FlashnextError | None = None
        self._signal = 0
        self._launch = 0
        self._server: Child | None = None
        self._vgpus: dict[Child, str | None] = {}
        self._controls: dict[Child, tuple[str, int]] = {}
        self._prober: prober.Prober | None = None
        self._was_ready = self._served = False
        self._oom_kills = 0
        self._ending = False
        self._insane_restart = False
        self._restarts = 0
        self._begin = self._since = self._resume_at = time.monotonic()
        self._progress_at = time.monotonic()
        self._mark: tuple[object, ...] = ()
        self._dying: tuple[float, Finding] | None = None
        self._refused = ""
        self._phase = transaction.Transaction()
        self._checked: tuple[float, prober.CheckPassed] | None = None
        self._drafts = Drafts()
        self._server_metrics = ""

    # --- the loop ----------------------------------------------------------------------------------------

    def run(self) -> int:
        """Serve until the end. Returns 128 + the signal that ended it; raises what made it impossible."""
        previous = {n: signal.signal(n, self._caught) for n in _STOP_SIGNALS if not is_nohup(n)}
        # a core of a process with pinned weights would be as large as the model
        resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
        control = Control(
            lambda: self._record.service,
            self._log.tail,
            lambda: self._server_metrics,
            port=self.plan.loaded.profile.server.control_port or 0,
        )
        self._record.update(control=control.url)
        try:
            self._start("asked to serve")
            while self.state not in _ENDS:
                self._step()
        finally:
            self._tear_down()
            if self.state is State.FATAL:
                control.farewell()
            control.close()
            self._record.end()
            self._log.close()
            for number, handler in previous.items():
                signal.signal(number, handler)
        if self._error is not None:
            raise self._error
        return 128 + self._signal

    def _step(self) -> None:
        try:
            event = self._events.get(timeout=_TICK_S)
        except queue.Empty:
            self._tick()
            return
        if isinstance(event.what, StopSignal):
            self._stop(event.what.number)
        elif event.launch == self._launch:
            self._handle(event)
            self._tick()

    def _handle(self, event: Event) -> None:
        if event.child is not None:
            self._child_said(event.child, event.what)
        else:
            self._prober_said(event.what)

    def _child_said(self, child: Child, what: object) -> None:
        match what:
            case Ended():
                self._ended(child)
            case markers.Marker() as marker:
                self._marker(child, marker)
            case Finding() as finding:
                self._found(child, finding)
            case Acceptance() as seen:
                self._accepted(seen)
            case PromptProgress() as prompt:
                self._progress_at = time.monotonic()
                self._record.reading(prompt)

    def _prober_said(self, what: object) -> None:
        match what:
            case prober.Healthy():
                if self.state is State.STARTING:
                    self._to(State.WARMING, "the model is loaded; checking its text")
            case prober.CheckPassed() as passed:
                self._passed(passed)
            case prober.CheckFailed() as failed:
                self._check_failed(failed)
            case prober.Slots() as slots:
                self._slots(slots)
            case prober.Metrics() as found:
                self._server_metrics = found.text
                self._record.update(metrics=found.values)
            case prober.Devices() as found:
                self._record.update(devices=found.devices)
                self._little_room(found.devices)

    def _tick(self) -> None:
        """Deadlines: all of them are looked at here, and whoever comes here is alive."""
        now = time.monotonic()
        self._notify.alive()
        if self.state is State.BACKOFF:
            self._resume(now)
        elif self._dying is not None and now - self._dying[0] > _DYING_S:
            finding = self._dying[1]
            self._trouble(Trouble(finding.kind, f"{finding.text}, and the process did not end", finding.line))
        elif self.state is State.STARTING:
            self._loading(now)
        elif self._checked is not None and now - self._checked[0] > _REHEARSAL_S:
            self._trouble(Trouble("not-rehearsed", transaction.NOT_REHEARSED))
        elif self.state is State.WARMING and now - self._moved() > 3 * self.life.check_limit_s + 10:
            self._trouble(Trouble("check-late", "the ready check did not come to an end"))
        elif self.state in (State.READY, State.DEGRADED):
            self._watch(now)

    def _moved(self) -> float:
        """When the ready check last had reason to hope: it may wait behind clients of a server that moves."""
        return max(self._since, self._progress_at)

    def _resume(self, now: float) -> None:
        """Start again once the pause is over, and devices and port are as free as the profile wants them."""
        if now < self._resume_at:
            return
        place = self.plan.loaded.profile.server.host, self.plan.place.port
        unfit = next(iter([*host.devices(self.plan.loaded), *host.port_taken(*place)]), None)
        if unfit is None:
            self._start(f"restart {self._restarts} of {self.life.restarts}")
            return
        reason = f"{unfit.message}: {'; '.join(unfit.context)}"
        if now - self._since < _HELD_S:
            self._resume_at = now + 1.0
            self._record.update(reason=f"waiting: {reason}")
        else:
            self._error = unfit
            self._to(State.FATAL, reason)

    def _watch(self, now: float) -> None:
        if self._server is not None and self._server.last_output > self._progress_at:
            self._progress_at = self._server.last_output
        if now - self._progress_at > self.life.no_progress_s:
            text = f"no token and no prompt progress for {self.life.no_progress_s} s with work to do"
            self._trouble(Trouble("no-progress", text))
        elif self._restarts and now - self._since > self.life.quiet_s:
            self._restarts = 0
            self._insane_restart = False

    def _loading(self, now: float) -> None:
        children = [c for c in (self._server, *self._vgpus) if c is not None]
        if self._server is None:
            if now - self._begin > _VGPU_START_S:
                missing = [c.name for c, endpoint in self._vgpus.items() if endpoint is None]
                self._trouble(Trouble("vgpu-late", f"{', '.join(missing)} did not announce a port"))
            return
        quiet = now - max([self._since, *(c.last_output for c in children)])
        if quiet > self.life.load_limit_s:
            text = f"loading showed no progress for {self.life.load_limit_s} s (life.load_limit_s)"
            self._trouble(Trouble("load-late", text))
        elif quiet < _MOVING_S:
            self._notify.loading()

    # --- starting and ending -----------------------------------------------------------------------------

    def _start(self, reason: str) -> None:
        self._begin = self._progress_at = time.monotonic()
        self._oom_kills = oom_kills()
        self._dying = None
        self._served = False
        self._refused = ""
        self._phase = transaction.Transaction()
        self._checked = None
        self._mark = ()
        self._to(State.STARTING, reason)
        for index, line in enumerate(self.plan.vgpu_lines()):
            child = self._child(f"vgpu{index}", line, self.plan.vgpu_env())
            if child is None:
                return
            self._vgpus[child] = None
        if not self._vgpus:
            self._start_server(())

    def _start_server(self, endpoints: tuple[str, ...]) -> None:
        line = self.plan.server_line(endpoints)
        self._record.update(argv=tuple(line))
        self._server = self._child("server", line, self.plan.server_env())
        if self._server is None:
            return
        launch = self._launch
        self._prober = prober.Prober(
            self.plan.address,
            lambda answer: self._events.put(Event(launch, answer)),
            key=self.plan.api_key,
            check_limit_s=self.life.check_limit_s,
            text_check_s=self.life.text_check_s,
            rehearse=self.plan.rehearses,
            gpus=host.device_memory if self.plan.loaded.profile.devices.kind == "cuda" else None,
            controls=tuple(self._controls[c] for c in self._vgpus if c in self._controls),
        )
        self._children_changed()

    def _child(self, name: str, argv: list[str], env: dict[str, str]) -> Child | None:
        launch = self._launch

        def post(child: Child, what: object) -> None:
            self._events.put(Event(launch, what, child))

        try:
            child = Child(
                name,
                argv,
                env,
                self._log,
                on_marker=post,
                on_finding=post,
                on_timing=post,
                on_line=self._on_line,
                on_end=lambda child: post(child, Ended()),
            )
        except OSError as error:
            self._trouble(Trouble("cannot-start", f"{name} cannot be started: {error}"))
            return None
        return child

    def _tear_down(self) -> None:
        """End every child, the server first. Idempotent; what they still have to say is dropped."""
        self._launch += 1
        self._ending = True
        self._server_metrics = ""
        if self._prober is not None:
            self._prober.stop()
            self._prober = None
        # before ready there is no answer to be finished: only our own check waits for one
        limit = float(self.life.stop_limit_s) if self._served else min(1.0, self.life.stop_limit_s)
        server, self._server = self._server, None
        vgpus, self._vgpus = list(self._vgpus), {}
        self._controls = {}
        self._dying = None
        if server is not None:
            # one TERM waits for a connected client, a second one does not
            server.stop(term_s=limit / 3, again_s=limit * 2 / 3)
        for child in vgpus:
            child.stop(term_s=1.0, again_s=0.5)
        self._ending = False
        self._children_changed()

    def _stop(self, number: int) -> None:
        self._signal = number
        self._to(State.STOPPING, f"{signal.Signals(number).name} received")
        self._tear_down()
        self._to(State.STOPPED, f"stopped by {signal.Signals(number).name}")

    def _caught(self, number: int, frame: FrameType | None) -> None:
        """Signal handler: the first one asks; one that meets an ending under way hurries it up."""
        if self._ending:
            for process in self._record.children:
                if process.alive:
                    try:
                        os.killpg(process.pid, signal.SIGKILL)
                    except ProcessLookupError:
                        continue
        self._events.put(Event(self._launch, StopSignal(number)))

    # --- what children and prober say --------------------------------------------------------------------

    def _ended(self, child: Child) -> None:
        code = child.process.wait()
        finding = self._dying[1] if self._dying is not None else None
        kind = finding.kind if finding is not None else "ended"
        text = f"{child.name} {ending(code)}"
        if code == -signal.SIGKILL and oom_kills() > self._oom_kills:
            # the next one would need as much, and might take somebody else along
            kind, text = "host-memory", f"{text}; the kernel killed a process for want of memory"
        if finding is not None:
            text += f"; {finding.text}"
        if self._refused:
            text += f"; {self._refused}"
        self._trouble(Trouble(kind, text, finding.line if finding else "", code=code))

    def _marker(self, child: Child, marker: markers.Marker) -> None:
        self._record.count(f"marker {marker.name}")
        if marker.name == "vgpu:listening" and child in self._vgpus:
            host = str(marker.data.get("host", "127.0.0.1"))
            self._vgpus[child] = f"{host}:{marker.data.get('port')}"
            control = marker.data.get("control_port")
            if isinstance(control, int):
                self._controls[child] = (host, control)
            endpoints = tuple(e for e in self._vgpus.values() if e is not None)
            if len(endpoints) == len(self.plan.vgpu_lines()) and self._server is None:
                self._start_server(endpoints)
        elif marker.name == "vgpu:refused":
            asked, free = (int(marker.data.get(key, 0)) for key in ("asked_bytes", "free_bytes"))
            self._refused = f"{child.name} refused {asked:,} bytes, {free:,} were free"
        elif (refused := failures.refusal(marker)) is not None:
            self._trouble(Trouble(refused.kind, refused.text, refused.line))
        elif marker.name == "lean:attached":
            self._record.lean(marker.data)
        elif marker.name in ("phase:begin", "phase:end"):
            if (wrong := self._phase.marked(marker.event, time.monotonic())) is not None:
                self._trouble(Trouble("phase-mismatch", wrong))
            elif self._checked is not None:
                self._passed(self._checked[1])
        elif (failed := failures.failure(marker)) is not None:
            self._found(child, failed)

    def _found(self, child: Child, finding: Finding) -> None:
        self._record.count(finding.kind)
        if finding.action is Action.WARN:
            self._record.warn(finding.text)
        elif finding.action is Action.GIVE_UP and finding.kind != "host-memory":
            child.drain(0.2)
            self._trouble(Trouble(finding.kind, finding.text, finding.line, code=child.code))
        elif finding.action in (Action.RESTART, Action.GIVE_UP) and self._dying is None:
            # the process usually ends by itself now, and how it ends belongs to the reason
            self._dying = (time.monotonic(), finding)

    def _passed(self, passed: prober.CheckPassed) -> None:
        self._record.gauge("check_tokens_per_second", passed.tokens_per_second)
        self._progress_at = time.monotonic()
        if self.state is State.WARMING and self.plan.rehearses and not self._phase.rehearsed:
            self._checked = (self._progress_at, passed)  # the markers may come after the answer
        elif self.state is State.WARMING:
            self._checked = None
            seconds = time.monotonic() - self._begin
            self._was_ready = self._served = True
            self._record.gauge("start_to_ready_s", round(seconds, 2))
            self._to(State.READY, f"answers sanely, {seconds:.1f} s after the start")
        elif self.state is State.DEGRADED:
            self._to(State.READY, "the text is sane again")

    def _check_failed(self, failed: prober.CheckFailed) -> None:
        if failed.insane and self.state is State.READY:
            self._to(State.DEGRADED, failed.reason)
        kind = "insane-text" if failed.insane else "check-failed"
        self._trouble(Trouble(kind, f"{failed.what} check: {failed.reason}"))

    def _slots(self, slots: prober.Slots) -> None:
        now = time.monotonic()
        if not slots.busy or slots.mark != self._mark:
            self._progress_at = now
        self._mark = slots.mark
        if (wrong := self._phase.polled(busy=slots.busy, now=now)) is not None:
            self._trouble(Trouble("phase-mismatch", wrong))
            return
        self._record.activity(slots)

    def _little_room(self, devices: prober.DeviceBooks) -> None:
        """A card that is full to the edge: the next program to want some of it ends us, or is ended by us."""
        if self.plan.loaded.profile.devices.kind != "cuda":
            return
        for device in devices:
            free = int(device["memory_bytes"]) - int(device["allocated_bytes"])
            if free < CARD_RESERVE:
                name = f"{device['name']}: only"
                text = f"{name} {mib(free)} free, {mib(CARD_RESERVE)} should stay: lower expert_cache.slots"
                self._record.warn(text, key=name)

    def _accepted(self, seen: Acceptance) -> None:
        self._drafts = self._drafts.add(seen)
        self._record.gauge("drafts", self._drafts.drafted)
        self._record.gauge("acceptance", round(self._drafts.rate, 4))
        mtp = self.plan.loaded.profile.mtp
        if mtp is not None and mtp.synthetic:
            return  # a head of random weights guesses nothing, and is the model's all the same
        if self._drafts.drafted >= DRAFTS_ENOUGH and self._drafts.rate < ACCEPTANCE_LOW:
            rate, drafts = self._drafts.rate, self._drafts.drafted
            text = f"acceptance is {rate:.1%} over {drafts} drafts: is the head this model's?"
            self._record.warn(text, key="acceptance")

    # --- trouble -----------------------------------------------------------------------------------------

    def _trouble(self, trouble: Trouble) -> None:
        """Something is wrong: end the children, then restart within the rules or give up."""
        lines = self._log.tail(20)
        self._tear_down()
        if not self._may_restart(trouble):
            self._error = error_for(trouble, self.plan, lines, was_ready=self._was_ready)
            self._to(State.FATAL, trouble.text)
            return
        self._restarts += 1
        self._insane_restart = self._insane_restart or trouble.kind == "insane-text"
        pause = min(self.life.backoff_s * 2.0 ** (self._restarts - 1), _BACKOFF_MAX_S)
        self._resume_at = time.monotonic() + pause
        self._record.update(restarts=self._record.service.restarts + 1)
        self._to(State.BACKOFF, f"{trouble.text}; trying again in {pause:g} s")

    def _may_restart(self, trouble: Trouble) -> bool:
        if not self._was_ready or self._restarts >= self.life.restarts:
            return False
        if trouble.kind == "insane-text" and self._insane_restart:
            return False
        return not trouble.final

    def _to(self, state: State, reason: str) -> None:
        check_transition(self.state, state)
        self.state = state
        self._since = time.monotonic()
        self._record.transition(state, reason)
        self._tell(state, reason)
        self._on_change(state, reason)

    def _tell(self, state: State, reason: str) -> None:
        """What the service manager hears: ready once per time it is, stopping once."""
        status = {"STATUS": f"{state}: {reason}"}
        if state is State.READY:
            self._notify.send(READY=1, **status)
        elif state in (State.STOPPING, State.FATAL):
            self._notify.send(STOPPING=1, **status)
        else:
            self._notify.send(**status)

    def _children_changed(self) -> None:
        children = [c for c in (self._server, *self._vgpus) if c is not None]
        self._record.update(children=tuple(c.record for c in children))

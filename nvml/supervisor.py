"""Keep one NVML child running, and carry requests to it. NVML may hang, crash or be replaced; a caller has its answer in time all the same.

One thread does it all: it starts the child, carries requests that wait together in one packet, and watches. A call that does not return in time costs the child:
it is killed, or abandoned where it cannot be killed (`nvml.replacing`). The driver is checked each second, and a child that opened another
one is replaced. While the file `released` exists there is no child, so that a GPU can be reset. The file `withheld` names single GPUs, by PCI address, that no child
opens (`nvml.withheld`).

Nothing here calls NVML. The thread itself never waits longer than a limit, and a caller no longer than its own.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Final

from nvml.calls import PendingCall, fail, next_calls
from nvml.driver import DriverIdentity, DriverWatch, identity
from nvml.errors import NvmlAway, NvmlOpening
from nvml.exchange import Hangs, NoAnswer, exchange
from nvml.messages import (
    AnyReply,
    AnyRequest,
    ErrorReply,
    GpuAtRequest,
    OpenReply,
    OpenRequest,
    PerGpuRequest,
)
from nvml.process import COMMAND, END_S, Child, Ended, Wake
from nvml.queries import Nvml
from nvml.replacing import EndReason, Quarantine, RestartDelay, too_many
from nvml.withheld import addresses, changed_from, read_withheld

START_S: Final = 120.0
"""Specified: without persistence mode eight GPUs take tens of seconds."""
CALL_S: Final = 10.0
"""Specified."""
TICK_S: Final = 1.0
"""Between checks of the driver, of `released` and of abandoned children. Guessed."""
MOST_WAITING: Final = 64
"""Requests that wait. Guessed: of few calling threads, each has at most as many as a packet takes."""
SLACK_S: Final = 5.0
"""A caller without a limit of its own waits so much longer than any call may take: the thread may have ended."""


@dataclass(frozen=True, slots=True)
class TimeLimits:
    """Seconds, from the settings."""

    start_s: float = START_S
    call_s: float = CALL_S
    end_s: float = END_S


class _Stop(Exception):
    """The child has to go, for this reason."""

    def __init__(self, end: EndReason, why: str) -> None:
        super().__init__(why)
        self.end, self.why = end, why


@dataclass(frozen=True, slots=True)
class _Abandoned:
    child: Child
    driver: DriverIdentity


class NvmlSupervisor:
    """See the module. `report` is called for each child that opened NVML (None) or was ended, in the supervisor's thread."""

    def __init__(
        self, driver_root: Path, limits: TimeLimits | None = None, *, released: Path | None = None,
        withheld: Path | None = None, report: Callable[[EndReason | None, str], None] = lambda *_: None, command: Sequence[str] = COMMAND,
        driver: Callable[[Path, str], DriverIdentity] = identity,
    ) -> None:  # fmt: skip
        self.failing = "NVML is being opened"
        """Why no call is answered; empty while a child answers."""
        self.ends: Counter[EndReason] = Counter()
        """Children that were ended, since the start."""
        self.hangs = 0
        """Calls about a GPU that did not return, since one did."""
        self.openings = 0
        """So often NVML was opened: it lists the GPUs that there were at the last time."""
        self.withheld: frozenset[str] = frozenset()
        """PCI addresses of GPUs that the last child did not open."""
        self._withheld = withheld
        self._driver_root, self._limits, self._released = driver_root, limits or TimeLimits(), released
        self._report, self._command = report, command
        self._changed = threading.Condition()
        self._calls: deque[PendingCall] = deque()
        self._closing = False
        self._reopen = ""
        self._opened: OpenReply | None = None
        self._starting, self._tried = True, False
        self._wake = Wake()
        self._child: Child | None = None
        self._driver = DriverWatch(driver_root, TICK_S, driver)
        self._answers_since_s = inf
        self._number = 0
        self._start_at_s = 0.0
        self._abandoned: list[_Abandoned] = []
        self._pauses, self._quarantine = RestartDelay(), Quarantine()
        self._thread = threading.Thread(target=self._run, name="nvml", daemon=True)

    def start(self) -> None:
        """Begin. Raises RuntimeError when there is no thread to be had."""
        self._thread.start()

    def close(self) -> None:
        """End the child and answer every caller. Returns soon, also when the child hangs. Again: no-op."""
        with self._changed:
            if self._closing:
                return
            self._closing = True
            self.failing = "NVML is closed"
        self._wake.ring()
        if self._thread.ident is not None:
            self._thread.join()
        self._wake.close()

    @property
    def nvml(self) -> Nvml:
        """NVML through this supervisor."""
        return Nvml(self)

    @property
    def abandoned(self) -> int:
        """Children that were killed and have not ended."""
        return len(self._abandoned)

    @property
    def abandoned_pids(self) -> tuple[int, ...]:
        """Theirs."""
        return tuple(one.child.pid for one in self._abandoned)

    @property
    def closed(self) -> bool:
        """`close` was called: no call is answered any more."""
        return self._closing

    @property
    def on_bus(self) -> frozenset[str] | None:
        """PCI addresses of the GPUs that the driver was bound to when NVML was opened; None where they cannot be read."""
        return self._driver.opened.on_bus

    @property
    def pid(self) -> int | None:
        """Of the child, where there is one."""
        child = self._child
        return None if child is None else child.pid

    def await_open(self, wait_s: float) -> OpenReply:
        """Where the library was found. Raises NvmlAway when NVML cannot be opened now, or after `wait_s`."""
        with self._changed:
            self._changed.wait_for(lambda: self._opened is not None or not self._starting or self._closing, wait_s)
            if self._opened is None or self._closing:
                raise (NvmlAway if self._tried else NvmlOpening)(self.failing)
            return self._opened

    def reopen(self, why: str) -> None:
        """The child cannot be used: replace it."""
        with self._changed:
            self._reopen = why
        self._wake.ring()

    def call_all(self, requests: Sequence[AnyRequest], wait_s: float | None = None) -> list[AnyReply]:
        """The child's answers; `ErrorReply` for a GPU that is left alone, or where none came within `wait_s`. Raises NvmlAway, at once where
        no child answers."""
        calls = [PendingCall(request) for request in requests]
        with self._changed:
            if self.failing:
                raise (NvmlAway if self._tried else NvmlOpening)(self.failing)
            now_s = time.monotonic()
            for call in calls:
                if why := self._quarantine.why(call.request.key, now_s):
                    call.answer(ErrorReply(why, kind="hung"))
            waiting = [call for call in calls if call.reply is None]
            if len(self._calls) + len(waiting) > MOST_WAITING:
                raise NvmlAway(f"{len(self._calls)} requests wait for NVML: at most {MOST_WAITING} may")
            self._calls += waiting
        if waiting:
            self._wake.ring()
        limit_s = self._limits.call_s + self._limits.end_s + SLACK_S if wait_s is None else wait_s
        until_s = now_s + limit_s
        for call in reversed(waiting):  # the last one first: the waiting thread wakes up once
            call.given_up = not call.done.wait(max(0.0, until_s - time.monotonic()))
        late = ErrorReply(f"NVML did not answer within {limit_s:g} s", kind="away")
        return [call.reply if call.reply is not None else late for call in calls]

    def _run(self) -> None:
        while not self._closing:
            try:
                self._turn()
            except _Stop as stop:
                self._end(stop.end, stop.why)
            except Exception as error:  # noqa: BLE001 - whatever it is, a thread that ended would leave every caller waiting
                self._end(EndReason.DIED, f"the supervisor of NVML failed: {type(error).__name__}: {error}")
                self._wake.wait(TICK_S)
        self._drop("NVML is closed")

    def _turn(self) -> None:
        self._reap()
        why = self._forbidden()
        if self._child is not None:
            if why or self._reopen:
                raise _Stop(EndReason.RELEASED if why else EndReason.REOPENED, why or self._reopen)
            if self._driver.changed():
                self._quarantine.forget()
                raise _Stop(EndReason.DRIVER, self._driver.change)
            if self.withheld != (now := self._to_withhold()):
                raise _Stop(EndReason.REOPENED, changed_from(self.withheld, now))
            self._serve(self._child)
        elif why:
            self._rest(why)
        elif (pause_s := self._start_at_s - time.monotonic()) > 0 and not self._driver.changed():
            self._rest(self.failing, min(TICK_S, pause_s))
        else:
            self._open()

    def _forbidden(self) -> str:
        """Why there must be no child now; empty when there may be."""
        if self._released is not None and self._released.exists():
            return f"NVML is released, as the file {self._released} exists: remove it when the GPUs may be used again"
        stuck = [one.child.pid for one in self._abandoned if one.driver == self._driver.opened]
        return too_many(stuck) if self._child is None and not self._driver.changed() else ""

    def _to_withhold(self) -> frozenset[str]:
        """Where the machine's GPUs are not known by address, none can be left out: then only `released` lets go of them."""
        on_bus = self._driver.opened.on_bus
        return (
            read_withheld(self._withheld) & addresses(on_bus) if self._withheld is not None and on_bus else frozenset()
        )

    def _rest(self, why: str, seconds: float = TICK_S) -> None:
        with self._changed:
            self.failing, self._starting, self._tried = why or self.failing, False, True
            self._changed.notify_all()
        self._wake.wait(seconds)

    def _open(self) -> None:
        with self._changed:
            self._starting, self._reopen = True, ""
        self._driver.opens()
        self.withheld = self._to_withhold()
        only = tuple(sorted(addresses(self._driver.opened.on_bus or ()) - self.withheld)) if self.withheld else None
        try:
            child = self._child = Child(self._command)
        except OSError as error:
            raise _Stop(EndReason.DIED, f"the NVML process cannot be started: {error}") from None
        limit_s = self._limits.start_s
        try:
            (reply,) = self._exchange(child, [OpenRequest(str(self._driver_root), only)], limit_s, may_stop=True)
        except Hangs:
            raise _Stop(EndReason.HUNG, f"the start of NVML did not return within {limit_s:g} s") from None
        if isinstance(reply, ErrorReply):
            raise _Stop(EndReason.REFUSED, reply.text)
        if not isinstance(reply, OpenReply):
            raise _Stop(EndReason.MALFORMED, f"the NVML process answered its start by {type(reply).__name__}")
        if not self._driver.has_opened(reply.path):
            raise _Stop(EndReason.DRIVER, "the driver was replaced while NVML was opened")
        self._answers_since_s = time.monotonic()
        with self._changed:
            self.openings += 1
            self._opened, self.failing = reply, "" if not self._closing else self.failing
            self._starting, self._tried = False, True
            self._changed.notify_all()
        self._announce(None, f"NVML is open, in process {self.pid}")

    def _serve(self, child: Child) -> None:
        """Wait for requests, at most a tick, and carry them out."""
        if not self._calls:
            packet = self._receive(child, time.monotonic() + TICK_S)
            if packet is not None:
                raise _Stop(EndReason.MALFORMED, f"the NVML process sent {len(packet)} bytes without a request")
            return
        if calls := next_calls(self._calls):
            self._carry_out(child, calls)

    def _carry_out(self, child: Child, calls: Sequence[PendingCall]) -> None:
        """A slow child answers the first ones; the others wait once more, behind requests that came meanwhile."""
        try:
            replies = self._exchange(child, [call.request for call in calls], self._limits.call_s)
        except Hangs as hangs:
            self._answered(calls[: hangs.answered])
            why = self._hung(calls[hangs.answered])
            fail(calls, why)
            raise _Stop(EndReason.HUNG, why) from None
        except _Stop as stop:
            fail(calls, stop.why)
            raise
        self._answered(calls[: len(replies)])
        for call, reply in zip(calls, replies, strict=False):
            call.answer(reply)
        with self._changed:
            self._calls += calls[len(replies) :]

    def _answered(self, calls: Sequence[PendingCall]) -> None:
        """The child has come back from these calls."""
        for call in calls:
            if isinstance(call.request, (PerGpuRequest, GpuAtRequest)):
                self.hangs = 0
                self._quarantine.answered(call.request.key)

    def _hung(self, call: PendingCall) -> str:
        """It has not come back from this one. Returns why."""
        request, of_gpu = call.request, isinstance(call.request, (PerGpuRequest, GpuAtRequest))
        name = f"{request.key}: " if of_gpu else ""
        why = f"{name}a call of NVML for {request.wants} did not return within {self._limits.call_s:g} s"
        if of_gpu:
            self.hangs += 1
            with self._changed:
                why = self._quarantine.hung(request.key, why, time.monotonic())
        call.answer(ErrorReply(why, kind="hung"))
        return why

    def _exchange(
        self, child: Child, requests: Sequence[AnyRequest], limit_s: float, *, may_stop: bool = False
    ) -> list[AnyReply]:
        """Replies to these, or to the first of them. `limit_s`: for each. Raises Hangs; _Stop for a child that ended or answers anything
        else; `may_stop`: also when it must go meanwhile."""

        def check() -> None:
            if self._closing:
                raise _Stop(EndReason.RELEASED, "NVML is closed")
            if may_stop and (why := self._forbidden()):
                raise _Stop(EndReason.RELEASED, why)

        first = self._number + 1
        self._number += len(requests)
        try:
            return exchange(child, first, requests, limit_s, self._wake, TICK_S, check)
        except Ended as ended:
            raise _Stop(EndReason.DIED, f"the NVML process ended: {ended}") from None
        except NoAnswer as error:
            raise _Stop(EndReason.MALFORMED, f"the NVML process sent no answer: {error}") from None

    def _receive(self, child: Child, until_s: float) -> bytes | None:
        try:
            return child.receive(until_s, self._wake)
        except Ended as ended:
            raise _Stop(EndReason.DIED, f"the NVML process ended: {ended}") from None

    def _end(self, end: EndReason, why: str) -> None:
        """Of the child, if there is one; and what follows for the next."""
        answered_s = max(0.0, time.monotonic() - self._answers_since_s)
        why = self._drop(why)
        pause_s = self._pauses.after(end, answered_s)
        self._start_at_s = time.monotonic() + pause_s
        self.ends[end] += 1
        if not self._closing:
            self._announce(end, why)

    def _announce(self, end: EndReason | None, why: str) -> None:
        with suppress(Exception):  # a log that cannot be written must not end the thread
            self._report(end, why)

    def _drop(self, why: str) -> str:
        """No child from now on; every waiting call fails. Returns the reason, with the pid of a child that cannot be killed."""
        child, self._child = self._child, None
        with self._changed:
            self._opened, self._reopen, self._answers_since_s = None, "", inf
            self.failing = self.failing if self._closing else why
            self._starting, self._tried = False, True
            waiting, self._calls = list(self._calls), deque()
            self._changed.notify_all()
        fail(waiting, why)
        if child is not None and not child.kill(self._limits.end_s):
            self._abandoned.append(_Abandoned(child, self._driver.opened))
            why = f"{why}; process {child.pid} cannot be killed"
            self.failing = self.failing if self._closing else why
        return why

    def _reap(self) -> None:
        self._abandoned = [one for one in self._abandoned if not one.child.ended()]


@contextmanager
def supervised(driver_root: Path, limits: TimeLimits | None = None) -> Iterator[Nvml]:
    """NVML for a while, in a child of this one program. Raises NvmlError."""
    supervisor = NvmlSupervisor(driver_root, limits)
    supervisor.start()
    try:
        supervisor.await_open((limits or TimeLimits()).start_s + SLACK_S)
        yield supervisor.nvml
    finally:
        supervisor.close()

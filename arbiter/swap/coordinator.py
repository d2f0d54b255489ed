"""The swap policy of a node, the requests that wait for it, and its trace. It knows which events require a decision, and calls none otherwise."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Final

import structlog

from arbiter.swap.results import Decided, Notice
from arbiter.swap.trace_file import TraceFile
from vgpu.memory.swap import events
from vgpu.memory.swap.actions import Action, Grant, OverLimit, Refuse, Report, Stranded
from vgpu.memory.swap.policy import SwapPolicy
from vgpu.memory.swap.settings import SwapSettings

STALL_S: Final = 2.0
"""A loop that did not come round for so long has not run. Guessed: it comes round once a second at least."""
LOGGED_EVERY_S: Final = 10.0
"""Between two refusals of one container in the log. Guessed."""
POOL_LOGGED_EVERY_S: Final = 60.0
"""Between two lines of one container that waits for room in the host pool. Guessed: a program tries again and again."""
_log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class WaitingRequest:
    """A request that the policy has not decided yet. Bytes."""

    id: str
    name: str
    gpu: str
    bytes: int
    elastic: bool


class Coordinator:
    """See the module. `state`: events that lead to the present state, for the trace."""

    def __init__(self, settings: SwapSettings, trace: Path | None, state: Callable[[], Iterable[events.Event]]) -> None:
        self.policy = SwapPolicy(settings)
        self.trace = TraceFile(trace, state)
        self.undecided = False
        """Whether something happened that the policy has not decided on."""
        self.requests: dict[str, WaitingRequest] = {}
        self.awake_at_s: float | None = None
        """When the arbiter's loop last came round; None: nobody says so."""
        self._decided: dict[str, tuple[Decided, WaitingRequest]] = {}
        self._notices: list[Notice] = []
        self._logs_from_s: dict[str, float] = {}
        """By container: when a refusal is logged again."""
        self._pool_logs_from_s: dict[str, float] = {}
        """By container: when its wait for the host pool is logged again."""
        self._paused: frozenset[str] | None = None

    def apply(self, event: events.Event, *, decides: bool = True) -> None:
        """Pass an event to the policy. `decides`: it may change a decision. Raises BadDocument."""
        self._note_stall(event.at_s)
        self.policy.apply(event)
        self.trace.add(event)
        self._paused = None
        self.undecided = self.undecided or decides

    def due(self, now_s: float) -> bool:
        """Whether a decision is."""
        deadline_s = self.policy.deadline_s()
        return self.undecided or (deadline_s is not None and deadline_s <= now_s)

    def decide(self, now_s: float) -> list[Action]:
        """The actions that are not answers to requests, which are recorded here. Those for operators are both."""
        self._note_stall(now_s)
        self.trace.add(events.Decided(now_s))
        self.undecided, self._paused = False, None
        actions = self.policy.decide(now_s)
        for action in actions:
            if isinstance(action, Refuse):
                self._log_refusal(action, now_s)
                self._answer(Decided(action.id, granted=False, reason=action.reason))
            elif isinstance(action, OverLimit | Stranded | Report):
                self._notices.append(action)
        self._log_pool_waits(now_s)
        return [action for action in actions if not isinstance(action, Refuse)]

    def _log_pool_waits(self, now_s: float) -> None:
        for name, wait in self.policy.pool_waits.items():
            if now_s >= self._pool_logs_from_s.get(name, -inf):
                self._pool_logs_from_s[name] = now_s + POOL_LOGGED_EVERY_S
                _log.warning("memory above the guarantee waits", grant=name, reason=wait.text)

    def _log_refusal(self, refuse: Refuse, now_s: float) -> None:
        """The program sees an error without a reason. Not each of a program that tries again and again."""
        name = self.requests[refuse.id].name
        if now_s >= self._logs_from_s.get(name, -inf):
            self._logs_from_s[name] = now_s + LOGGED_EVERY_S
            _log.info("memory refused", grant=name, bytes=self.requests[refuse.id].bytes, reason=refuse.reason)

    def _note_stall(self, now_s: float) -> None:
        """An arbiter that did not run has read no answer: no container is late for that."""
        if self.awake_at_s is None or now_s - self.awake_at_s < STALL_S:
            return
        stalled = events.Stalled(now_s, now_s - self.awake_at_s)
        self.awake_at_s = now_s
        self.policy.apply(stalled)
        self.trace.add(stalled)

    def granted(self, grant: Grant) -> WaitingRequest:
        """The request is answered."""
        return self._answer(Decided(grant.id, granted=True, reason=""))

    def answer(self, id_: str) -> tuple[Decided, WaitingRequest] | None:
        """The decision on a request, once; None: it waits, or its decision was fetched."""
        return self._decided.pop(id_, None)

    def granted_bytes(self, name: str, gpu: str) -> tuple[int, int]:
        """Resident and elastic memory that was granted to a container and that `decided` has not said yet."""
        resident_bytes = elastic_bytes = 0
        for decided, request in self._decided.values():
            if decided.granted and (request.name, request.gpu) == (name, gpu):
                resident_bytes += request.bytes * (not request.elastic)
                elastic_bytes += request.bytes * request.elastic
        return resident_bytes, elastic_bytes

    def decided(self) -> list[Decided]:
        """The first that was not fetched; empty: none. One at a time: what was granted to the others is not in their ledgers when this one is passed on."""
        return [self._decided.pop(id_)[0] for id_ in list(self._decided)[:1]]

    def _answer(self, decided: Decided) -> WaitingRequest:
        request = self.requests.pop(decided.id)
        self._decided[decided.id] = decided, request
        return request

    def notice(self, notice: Notice) -> None:
        """Something that the policy cannot know."""
        self._notices.append(notice)

    def notices(self) -> list[Notice]:
        """Since the last call."""
        notices, self._notices = self._notices, []
        return notices

    def paused(self, name: str) -> bool:
        """Whether the container must not run, or that is not decided yet."""
        if self.undecided:
            return True
        if self._paused is None:
            self._paused = self.policy.paused()
        return name in self._paused

    def room_bytes(self, name: str, gpu: str) -> int | None:
        """What it may make on a GPU now; None: that is to be decided first."""
        return None if self.undecided else self.policy.room_bytes(name, gpu)

    def drop(self, name: str) -> None:
        """The container's requests are gone."""
        self._logs_from_s.pop(name, None)
        self._pool_logs_from_s.pop(name, None)
        self.requests = {id_: one for id_, one in self.requests.items() if one.name != name}
        self._decided = {id_: both for id_, both in self._decided.items() if both[1].name != name}

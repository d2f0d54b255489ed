"""The memory of one GPU, for the requests of all its containers: granted now, waiting until others have given memory back, or never.

The ledger (`vgpu.memory.ledger`) has decided that a request is within its container's limits. If a container may use more than its guarantee, the GPU as a
whole may still be short. The rules, in their order
    never      A request that would not fit if its container had the GPU alone is refused at once.
    guarantee  Requests within their container's guarantee come first. They wait as long as it takes: others have to give their excess back.
    excess     All other requests wait for at most their own `wait_s`, and get only memory that no request within a guarantee waits for.
    order      Of two requests with equal right the earlier one comes first, also if only the later one fits: else a large request could wait for ever.

A request that waits is reported once a second with what is missing, so that its process knows that the arbiter has not forgotten it. Pure: the caller passes
the time in seconds of any one clock, and chooses the numbers of requests and the names of containers. Bytes.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from math import inf
from typing import Final

REPORT_S: Final = 1.0
"""Period of the reports on a request that waits. Specified: PENDING in docs/reference/protocol.md."""


@dataclass(frozen=True, slots=True)
class Admitted:
    """The request is granted: its bytes count as used by its container from now on."""

    request: Hashable


@dataclass(frozen=True, slots=True)
class Refused:
    """The request does not fit, and has waited long enough."""

    request: Hashable


@dataclass(frozen=True, slots=True)
class Waits:
    """The request waits until others have given back `missing_bytes` in all, those for earlier requests included."""

    request: Hashable
    missing_bytes: int


Answer = Admitted | Refused | Waits


@dataclass(slots=True)
class _Container:
    guarantee_bytes: int
    used_bytes: int = 0


@dataclass(slots=True)
class _Request:
    name: str
    need_bytes: int
    until_s: float
    report_s: float
    """When it is to be reported next."""


class GpuBudget:
    """See the module. `capacity_bytes`: what all containers together may have on the GPU."""

    def __init__(self, capacity_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes
        self._containers: dict[str, _Container] = {}
        self._requests: dict[Hashable, _Request] = {}
        """In the order of their arrival."""

    @property
    def free_bytes(self) -> int:
        """What no container uses. Negative if the containers state more than there is."""
        return self.capacity_bytes - sum(one.used_bytes for one in self._containers.values())

    def guarantee(self, name: str, guarantee_bytes: int) -> None:
        """A container came, or its guarantee changed."""
        self._containers.setdefault(name, _Container(0)).guarantee_bytes = guarantee_bytes

    def leave(self, name: str) -> None:
        """A container ended, and its requests with it."""
        self._containers.pop(name, None)
        self._requests = {key: request for key, request in self._requests.items() if request.name != name}

    def use(self, name: str, used_bytes: int) -> None:
        """All that a container has on the GPU now, admitted requests included; what is away does not count. KeyError if it is unknown."""
        self._containers[name].used_bytes = used_bytes

    def request(self, key: Hashable, name: str, need_bytes: int, wait_s: float, now_s: float) -> None:
        """A container requests `need_bytes` more. `decide` answers. KeyError if the container is unknown, ValueError if the request is known."""
        if name not in self._containers:
            raise KeyError(name)
        if key in self._requests:
            raise ValueError(f"request {key!r} of {name}: an earlier one of this number waits")
        self._requests[key] = _Request(name, need_bytes, now_s + wait_s, now_s)

    def withdraw(self, key: Hashable) -> None:
        """The request's process ended, or no longer waits."""
        self._requests.pop(key, None)

    def is_guaranteed(self, key: Hashable) -> bool:
        """Whether a request that waits is within its container's guarantee now. KeyError if it is unknown."""
        request = self._requests[key]
        container = self._containers[request.name]
        return container.used_bytes + request.need_bytes <= container.guarantee_bytes

    def decide(self, now_s: float) -> list[Answer]:
        """Answer what can be answered, and report what waits and is due. Cost: O(requests x log) for each that is answered."""
        answers: list[Answer] = []
        while (answer := self._next_answer(now_s)) is not None:
            answers.append(answer)
        ahead_bytes = 0
        for key in self._in_order():
            request = self._requests[key]
            ahead_bytes += request.need_bytes
            if now_s >= request.report_s:
                request.report_s = now_s + REPORT_S
                answers.append(Waits(key, ahead_bytes - self.free_bytes))
        return answers

    def deadline_s(self) -> float:
        """When `decide` is to be called next if nothing else happens; inf = not before."""
        return min(
            (min(one.report_s, inf if self.is_guaranteed(key) else one.until_s) for key, one in self._requests.items()),
            default=inf,
        )

    def _next_answer(self, now_s: float) -> Admitted | Refused | None:
        """Admit the first request in order if it fits now; else refuse one that does not wait any longer."""
        order = self._in_order()
        if order and self._requests[order[0]].need_bytes <= self.free_bytes:
            request = self._requests.pop(order[0])
            self._containers[request.name].used_bytes += request.need_bytes
            return Admitted(order[0])
        over = next((key for key in order if self._is_over(key, now_s)), None)
        if over is None:
            return None
        del self._requests[over]
        return Refused(over)

    def _is_over(self, key: Hashable, now_s: float) -> bool:
        request = self._requests[key]
        never = self._containers[request.name].used_bytes + request.need_bytes > self.capacity_bytes
        return not self.is_guaranteed(key) and (never or now_s >= request.until_s)

    def _in_order(self) -> list[Hashable]:
        """Requests within a guarantee first; of each kind the earlier first."""
        return sorted(self._requests, key=lambda key: not self.is_guaranteed(key))

"""Long requests of all clients together are read at so many bytes a second, shared among addresses, and among the requests of one address.

Quanta go by two rules in alternation, first among addresses, then among the requests of the chosen one: the first to the one with the fewest bytes (least attained
service), the next one to the one that waits longest (round robin). By the first rule a short request is not behind many long ones, by the second none starves: alone,
the first one would let requests that are always new keep a long one waiting for ever.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from math import inf
from operator import itemgetter
from typing import Final, Generic, TypeVar

from observe.fairness import PacedWork

QUANTUM_BYTES: Final = 64 * 2**10
"""Of one quantum. 16 MiB a second are 256 quanta."""

AT_ONCE: Final = 4
"""Turns that are begun without a wait after the pace was not used up, as timers are late by a millisecond."""

MOST_DEBT_BYTES: Final = 2**20
"""What was read beyond the pace delays all clients by this at most (63 ms at 16 MiB a second). More counts against the senders alone."""

REMEMBERED: Final = 1024
"""Clients that do not wait and are known: those that had most. Twice as many are, until others are forgotten."""

K = TypeVar("K", bound=Hashable)


class FairShares(Generic[K]):
    """The next of those that wait. A client that was away, or is new, counts as one that had `credit_bytes` less than the one that was read last."""

    def __init__(self, credit_bytes: float) -> None:
        self._credit_bytes = credit_bytes
        self._had_bytes: dict[K, float] = {}
        self._at_bytes = 0.0
        """What the client had that had least when it was read. Grows."""
        self._by_need = False
        self._look_at = REMEMBERED
        """So many clients are known when those that had little are forgotten."""

    def __len__(self) -> int:
        return len(self._had_bytes)

    def join(self, client: K) -> None:
        """It waits now, and did not before."""
        self._had_bytes[client] = max(self._had_bytes.get(client, 0.0), self._floor)

    def next_of(self, waiting: Mapping[K, object]) -> K:
        """One that joined, of those in the order in which they wait."""
        if len(self._had_bytes) > self._look_at:
            floor = self._floor
            others = ((had, one) for one, had in self._had_bytes.items() if had > floor and one not in waiting)
            known = {one: self._had_bytes[one] for one in waiting}
            known |= {one: had for had, one in heapq.nlargest(REMEMBERED, others, key=itemgetter(0))}
            self._had_bytes, self._look_at = known, 2 * REMEMBERED + len(waiting)
        self._by_need = not self._by_need
        if not self._by_need:
            return next(iter(waiting))
        found = min(waiting, key=self._had_bytes.__getitem__)
        self._at_bytes = max(self._at_bytes, self._had_bytes[found])
        return found

    def charge(self, client: K, more_bytes: float) -> None:
        """It had so many more."""
        self._had_bytes[client] = self._had_bytes.get(client, self._floor) + more_bytes

    def pass_by(self, more_bytes: float) -> None:
        """So many could have been read, and no request waited."""
        self._at_bytes += more_bytes

    def forget(self, client: K) -> None:
        """It has ended."""
        self._had_bytes.pop(client, None)

    @property
    def _floor(self) -> float:
        return max(0.0, self._at_bytes - self._credit_bytes)


@dataclass(eq=False, slots=True)
class _Address:
    """With a long request."""

    requests: int = 0
    waiting: dict[LongRequest, Callable[[], object]] = field(default_factory=dict)
    """What begins the quantum of each waiting request; the one that waits longest comes first."""
    shares: FairShares[LongRequest] = field(default_factory=lambda: FairShares(inf))


class Pace(PacedWork):
    """Of one listener. A quantum is `QUANTUM_BYTES`, and is charged when it begins: a client that then sends nothing delays others by that much once."""

    def __init__(self, bytes_per_s: float, credit_bytes: float) -> None:
        super().__init__()
        self._bytes_per_s = bytes_per_s
        self._most_bytes = self._left_bytes = float(AT_ONCE * QUANTUM_BYTES)
        self._filled_s = self._loop.time()
        self._shares = FairShares[str](credit_bytes)
        self._addresses: dict[str, _Address] = {}
        self._waiting: dict[str, _Address] = {}

    def __len__(self) -> int:
        """Requests that wait for a quantum."""
        return sum(len(one.waiting) for one in self._waiting.values())

    def enter(self, address: str) -> LongRequest:
        """A request has become long."""
        one = self._addresses.setdefault(address, _Address())
        one.requests += 1
        return LongRequest(self, address)

    def leave(self, request: LongRequest) -> None:
        """It has ended."""
        self.withdraw(request)
        one = self._addresses[request.address]
        one.shares.forget(request)
        one.requests -= 1
        if one.requests == 0:
            del self._addresses[request.address]

    def submit(self, request: LongRequest, begin: Callable[[], object]) -> None:
        """Call `begin` when its quantum begins, never at once."""
        self._fill()
        one = self._addresses[request.address]
        if not one.waiting:
            self._shares.join(request.address)
            self._waiting[request.address] = one
        one.shares.join(request)
        one.waiting[request] = begin
        self._arrange()

    def withdraw(self, request: LongRequest) -> None:
        """It waits no more; no error if it does not, or has ended."""
        one = self._addresses.get(request.address)
        if one is not None and one.waiting.pop(request, None) is not None and not one.waiting:
            del self._waiting[request.address]

    def charge(self, request: LongRequest, more_bytes: float) -> None:
        """It had so much."""
        self._left_bytes = max(self._left_bytes - more_bytes, -MOST_DEBT_BYTES)
        self._shares.charge(request.address, more_bytes)
        self._addresses[request.address].shares.charge(request, more_bytes)

    def _fill(self) -> None:
        """By the time that went by."""
        now_s = self._loop.time()
        left_bytes = self._left_bytes + (now_s - self._filled_s) * self._bytes_per_s
        self._filled_s, self._left_bytes = now_s, min(self._most_bytes, left_bytes)
        if not self._waiting:
            self._shares.pass_by(left_bytes - self._left_bytes)

    def _any_waits(self) -> bool:
        return bool(self._waiting)

    def _wait_s(self) -> float:
        self._fill()
        return (QUANTUM_BYTES - self._left_bytes) / self._bytes_per_s

    def _take(self) -> Callable[[], object]:
        address = self._shares.next_of(self._waiting)
        one = self._waiting.pop(address)
        request = one.shares.next_of(one.waiting)
        begin = one.waiting.pop(request)
        if one.waiting:
            self._waiting[address] = one  # behind the others
        self.charge(request, QUANTUM_BYTES)
        return begin


class LongRequest:
    """One that is longer than what is read at once."""

    __slots__ = ("_may_send_bytes", "_pace", "address")

    def __init__(self, pace: Pace, address: str) -> None:
        self._pace, self.address = pace, address
        self._may_send_bytes = 0

    def sent(self, more_bytes: int) -> bool:
        """It sent so much. Must it wait for a quantum before it sends more? What an event loop reads beyond a quantum, as it reads in larger pieces, is charged at once."""
        self._may_send_bytes -= more_bytes
        if self._may_send_bytes < 0:
            self._pace.charge(self, -self._may_send_bytes)
            self._may_send_bytes = 0
        return self._may_send_bytes == 0

    def wait(self, begin: Callable[[], object]) -> Callable[[], None]:
        """Call `begin` when this request is next. Returns what to call if that is no longer needed."""

        def quantum() -> None:
            self._may_send_bytes += QUANTUM_BYTES
            begin()

        self._pace.submit(self, quantum)
        return self.withdraw

    def withdraw(self) -> None:
        """It does not wait any more."""
        self._pace.withdraw(self)

    def end(self) -> None:
        """It is complete, or its connection has ended. Once."""
        self._pace.leave(self)

"""The open connections of one listener, and which of them are closed when clients exceed its limits (invariant I9).

Decisions only: `protocol` counts bytes and reports phases, `acceptor` closes what this module names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from enum import Enum, IntEnum
from math import inf
from typing import Final

from observe.bounds import Bounds
from observe.refusals import RefusalCounter, not_counted

YOUNG_S: Final = 1.0
"""A connection without a whole request is closed for another's sake only when it is older, as long as there is any other choice. A request of
the API server takes milliseconds."""

ANSWERED_WELL_S: Final = 60.0
"""So long after a request that was answered 200 the connections of its address count a tenth: an API server with a hundred calls under way has fewer than
one client of a flood. Guessed."""
ORDINARY: Final = 10
"""Connections of an API server that count as one of another client."""


class Phase(Enum):
    """Where a connection is."""

    REQUEST = "a request is awaited, or arrives"
    QUEUED = "its request waits in the queue"
    WORK = "the program makes the answer"
    ANSWER = "the client reads the answer"
    IDLE = "it was served and may send another request"


class Rank(IntEnum):
    """In which order connections are closed for others."""

    UNSERVED = 0
    """No whole request was answered on it."""
    IDLE = 1
    BUSY = 2


@dataclass(eq=False, slots=True)
class ClientConnection:
    """One client's connection."""

    address: str
    since_s: float
    """When the phase began; monotonic."""
    phase: Phase = Phase.REQUEST
    served: bool = False
    """Was a whole request answered on it?"""
    well: bool = False
    """Was the last request on it answered well, on a listener that trusts such a connection?"""
    held_bytes: int = 0
    fd: int = -1
    close: Callable[[], object] = lambda: None
    """Ends it at once, wherever it is: accepted, in its handshake, or served."""
    shed: Callable[[], object] = lambda: None
    """Drops what is in memory for it."""
    withdraw: Callable[[], object] = lambda: None
    """Takes it out of the queue in which it waits to be begun, if it does."""
    over_its_part: bool = False
    """Was it closed for a connection of its own address, or while its address had more than an equal part of all?"""
    order: int = 0
    """Grows with each phase of any connection."""

    @property
    def rank(self) -> Rank:
        """As the phase is."""
        if self.phase is Phase.REQUEST and not self.served:
            return Rank.UNSERVED
        return Rank.IDLE if self.phase is Phase.IDLE else Rank.BUSY


Ordered = dict[ClientConnection, None]
"""Oldest phase first."""


Place = tuple[int, int]
"""Among addresses, the greatest first: what its connections weigh together, and how little the first of them to go is worth."""


@dataclass(eq=False, slots=True)
class OfAddress:
    """The connections of one address."""

    by_rank: tuple[Ordered, Ordered, Ordered] = field(default_factory=lambda: ({}, {}, {}))
    count: int = 0
    each: int = ORDINARY
    """What each of them weighs against those of other addresses."""
    filed: Place | None = None
    """Where `ClientConnections` has it."""

    @property
    def weight(self) -> int:
        return self.count * self.each

    @property
    def place(self) -> Place:
        unserved, idle, _busy = self.by_rank
        return self.weight, -(Rank.UNSERVED if unserved else Rank.IDLE if idle else Rank.BUSY)

    def oldest(self) -> ClientConnection:
        """Of the first rank that it has."""
        return next(one for ordered in self.by_rank for one in ordered)


@dataclass(slots=True)
class ClientConnections:
    """The open connections of one listener, oldest phase first."""

    bounds: Bounds
    refused: RefusalCounter = not_counted
    _open: Ordered = field(default_factory=dict)
    _unserved: Ordered = field(default_factory=dict)
    _addresses: dict[str, OfAddress] = field(default_factory=dict)
    _alike: dict[Place, dict[OfAddress, None]] = field(default_factory=dict)
    """Addresses by their places: a flood has a choice made for each of its connections, and there are few places."""
    _weight: int = 0
    """Of all addresses."""
    _answered_well_s: dict[str, float] = field(default_factory=dict)
    """When an address was last answered 200."""
    held_bytes: int = 0
    _order: int = 0

    def __len__(self) -> int:
        return len(self._open)

    def __iter__(self) -> Iterator[ClientConnection]:
        return iter(self._open)

    def __contains__(self, one: ClientConnection) -> bool:
        return one in self._open

    def add(self, one: ClientConnection) -> ClientConnection | None:
        """A client connected. Returns the connection to close for it, if there are too many."""
        found = None
        same = self._addresses.get(one.address)
        if same is not None and same.count >= self.bounds.per_address:
            found = same.oldest()
        elif len(self._open) >= self.bounds.connections:
            found = self._choose(one.since_s)
        if found is not None:
            self.refused("connections")
            weight = self._addresses[found.address].weight
            found.over_its_part = found.address == one.address or weight * len(self._addresses) > self._weight
            self.remove(found)
        if one.address not in self._addresses:
            self._addresses[one.address] = OfAddress(each=1 if one.address in self._answered_well_s else ORDINARY)
        of_address = self._addresses[one.address]
        of_address.count += 1
        self._weight += of_address.each
        self._insert(one)
        return found

    def remove(self, one: ClientConnection) -> None:
        """It was closed; no error if that is known."""
        if one not in self._open:
            return
        self._delete(one)
        of_address = self._addresses[one.address]
        of_address.count -= 1
        self._weight -= of_address.each
        if of_address.count == 0:
            del self._addresses[one.address]
        self._file(of_address)
        self.held_bytes -= one.held_bytes
        one.held_bytes = 0

    def enter(self, one: ClientConnection, phase: Phase, at_s: float) -> None:
        """It is in another phase from now on, which begins now even if it is the same. IDLE: it was served, and its memory is free."""
        if one not in self._open:
            return
        self._delete(one)
        if phase is Phase.IDLE:
            one.served = True
            self.held_bytes -= one.held_bytes
            one.held_bytes = 0
        one.phase, one.since_s = phase, at_s
        self._insert(one)

    def answered_well(self, one: ClientConnection, at_s: float) -> None:
        """A request on it was answered 200."""
        one.well = self.bounds.trusted
        self._answered_well_s.pop(one.address, None)
        self._answered_well_s[one.address] = at_s
        self._weigh(one.address, 1)
        if len(self._answered_well_s) > self.bounds.connections:
            self._forget(next(iter(self._answered_well_s)))

    def is_answered_well(self, address: str) -> bool:
        """In the last minute, as far as that is remembered."""
        return address in self._answered_well_s

    def hold(self, one: ClientConnection, more_bytes: int) -> list[ClientConnection]:
        """So much more of a request or an answer is in memory for it. Returns the connections that have to free it, if all together use too much."""
        if one not in self._open:
            return []
        one.held_bytes += more_bytes
        self.held_bytes += more_bytes
        dropping: list[ClientConnection] = []
        while self._is_too_much(one) and one not in dropping:
            dropping.append(self._choose_holder(one) or one)
            self.refused("memory")
            self.release(dropping[-1], dropping[-1].held_bytes)
        return dropping

    def _is_too_much(self, one: ClientConnection) -> bool:
        if self.held_bytes > self.bounds.held_bytes:
            return True
        if one.well or not self.bounds.trusted or self.held_bytes <= self.bounds.unproven_bytes:
            return False
        return sum(each.held_bytes for each in self._open if not each.well) > self.bounds.unproven_bytes

    def release(self, one: ClientConnection, bytes_: int) -> None:
        """So much less is in memory for it. No error for what was dropped before."""
        bytes_ = min(bytes_, one.held_bytes)
        one.held_bytes -= bytes_
        self.held_bytes -= bytes_

    def expired(self, at_s: float) -> list[ClientConnection]:
        """Those that stayed in their phase for longer than its limit. They are removed."""
        limit_s = {
            Phase.REQUEST: self.bounds.request_s,
            Phase.ANSWER: self.bounds.answer_s,
            Phase.IDLE: self.bounds.idle_s,
        }
        late = [one for one in self._open if at_s - one.since_s > limit_s.get(one.phase, inf)]
        for one in late:
            if one.phase is not Phase.IDLE:
                self.refused("late" if one.phase is Phase.REQUEST else "unread")
            self.remove(one)
        for address in [of for of, well_s in self._answered_well_s.items() if at_s - well_s > ANSWERED_WELL_S]:
            self._forget(address)
        return late

    def _insert(self, one: ClientConnection) -> None:
        self._order += 1
        one.order = self._order
        self._open[one] = None
        of_address, rank = self._addresses[one.address], one.rank
        of_address.by_rank[rank][one] = None
        self._file(of_address)
        if rank is Rank.UNSERVED:
            self._unserved[one] = None

    def _delete(self, one: ClientConnection) -> None:
        del self._open[one]
        del self._addresses[one.address].by_rank[one.rank][one]
        self._unserved.pop(one, None)

    def _file(self, of_address: OfAddress) -> None:
        """Where it belongs now; nowhere when it has no connection."""
        place = of_address.place if of_address.count else None
        if place == of_address.filed:
            return
        if of_address.filed is not None:
            alike = self._alike[of_address.filed]
            del alike[of_address]
            if not alike:
                del self._alike[of_address.filed]
        if place is not None:
            self._alike.setdefault(place, {})[of_address] = None
        of_address.filed = place

    def _forget(self, address: str) -> None:
        """That it was answered well."""
        del self._answered_well_s[address]
        self._weigh(address, ORDINARY)

    def _weigh(self, address: str, each: int) -> None:
        of_address = self._addresses.get(address)
        if of_address is not None:
            self._weight += of_address.count * (each - of_address.each)
            of_address.each = each
            self._file(of_address)

    def _choose(self, at_s: float) -> ClientConnection:
        """The connection to close for another: the oldest without a whole request, if it is older than a second and its address has its part of all connections; one
        of an address that has less has all the time that a request has. Where there is none, the client with the most connections loses its oldest without a
        whole request, else idle, else with a request under way. Of several with as many the one loses that has nothing better, and then the one that has
        been so the longest. A flood makes this choice for each of its connections, so it goes through those of one second at most."""
        return self._choose_late(self._unserved, at_s) or self._choose_of_most()

    def _choose_late(self, unserved: Iterable[ClientConnection], at_s: float) -> ClientConnection | None:
        part = self._weight / len(self._addresses)
        for one in unserved:
            age_s = at_s - one.since_s
            if age_s <= YOUNG_S:
                return None
            if self._addresses[one.address].weight >= part or age_s > self.bounds.request_s:
                return one
        return None

    def _choose_of_most(self) -> ClientConnection:
        return next(iter(self._alike[max(self._alike)])).oldest()

    def _choose_holder(self, requesting: ClientConnection) -> ClientConnection | None:
        """As `_choose`, among those that use memory and whose answer is not being made. Those whose last request was answered well come last."""
        holders = [
            one for one in self._open if one.held_bytes > 0 and one.phase is not Phase.WORK and one is not requesting
        ]
        unproven = [one for one in holders if not one.well]
        if not unproven and not requesting.well:
            return None
        holders = unproven or holders
        if not holders:
            return None
        if late := self._choose_late((one for one in holders if one.rank is Rank.UNSERVED), requesting.since_s):
            return late
        most = max(self._addresses[one.address].weight for one in holders)
        return min((one for one in holders if self._addresses[one.address].weight == most), key=_rank_and_age)


def _rank_and_age(one: ClientConnection) -> tuple[Rank, int]:
    return one.rank, one.order

"""One container as the policy of GPU time sees it: its processes, their channels, and what it says about its work.

The parts that decide nothing themselves: a tenant adds up what its processes say, and stops or starts all of them on a card.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from arbiter.page import Page
from arbiter.seat import Seat
from vgpu import rm, wire
from vgpu.errors import BadDocument
from vgpu.grant import Grant
from vgpu.names import CLASSES
from vgpu.trace import Begin, End, Event, Hint, Idle, Tenant, Work

BEST_EFFORT = CLASSES[-1]


@dataclass(slots=True)
class Process:
    """One connection that tells of turns."""

    pid: int
    working: bool = False
    yields: bool = False
    seats: dict[tuple[int, int], Seat] = field(default_factory=dict)
    """By card of the grant and client."""


class TenantTurns:
    """A container that has channels on at least one card. `name` is its grant directory's."""

    def __init__(self, name: str, grant: Grant, page: Page) -> None:
        self.name = name
        self.grant = grant
        self.page = page
        self.processes: dict[int, Process] = {}
        self.joined: Tenant | None = None
        """As the policy knows it; None = not, for want of channels."""
        self.wanted = True
        """Should it be on?"""
        self.on: dict[str, bool] = {}
        """Is it, on each of its cards? A card without an entry was never switched: it is on."""
        self.trouble = ""
        """Why it cannot be suspended; empty = it can."""

    def terms(self) -> Tenant | None:
        """What the policy is told; None when there is nothing to switch."""
        cards = {self.grant.cards[card].uuid for process in self.processes.values() for card, _ in process.seats}
        if not cards:
            return None
        percent = max(card.core_percent for card in self.grant.cards if card.uuid in cards)
        yields = any(process.yields for process in self.processes.values())
        klass = BEST_EFFORT if yields else self.grant.klass
        return Tenant(frozenset(cards), klass, self.grant.level, percent, percent or self.free_weight)

    free_weight = 100.0
    """Weight of who asked for no percentage: as much as a whole card's."""

    def says(self, number: int, activity: wire.Activity, at_s: float) -> list[Event]:
        """What a process's message means for the whole container."""
        process, before = self.processes[number], self.working()
        match activity.what:
            case wire.What.WORK | wire.What.IDLE:
                process.working = activity.what == wire.What.WORK
                return self._changed(before, at_s)
            case wire.What.YIELD | wire.What.END_YIELD:
                process.yields = activity.what == wire.What.YIELD
                return []
            case wire.What.HINT:
                return [Hint(at_s, self.name, min(activity.value, 10_000_000) / 1e6)] if self.urgent else []
            case wire.What.BEGIN_SECTION:
                return [Begin(at_s, self.name)] if self.urgent else []
            case _:
                return [End(at_s, self.name)] if self.urgent else []

    def leaves(self, number: int, at_s: float) -> list[Event]:
        """A process is gone; its descriptors are given up at once."""
        before = self.working()
        for seat in self.processes.pop(number).seats.values():
            seat.close()
        return self._changed(before, at_s)

    def sits(self, number: int, channels: wire.Channels, fd: int | None) -> None:
        """A process has these channels from now on. Raises BadDocument."""
        if channels.card >= len(self.grant.cards):
            raise BadDocument(f"packet names card {channels.card}: this container has {len(self.grant.cards)}, from 0")
        seats, key = self.processes[number].seats, (channels.card, channels.client)
        fresh = Seat(channels, fd) if fd is not None and channels.compute else None
        old = seats.pop(key, None)
        if old is not None:
            old.close()
        if fresh is not None:
            seats[key] = fresh

    @property
    def urgent(self) -> bool:
        """May it announce its work?"""
        return self.grant.klass == CLASSES[0]

    def working(self) -> bool:
        """Has any of its processes work?"""
        return any(process.working for process in self.processes.values())

    def is_on(self, card: str) -> bool:
        """Is it on, on this card?"""
        return self.on.get(card, True)

    def switch(self, card: str, on: bool) -> int:
        """Start or stop all its processes on a card: the driver's status. A stop that fails is taken back whole.

        Blocks for about half a millisecond a process. Called without any lock, so the seats are those of a moment ago: one that
        was closed meanwhile answers with an error, and its process is gone.
        """
        seats = [
            seat
            for process in list(self.processes.values())
            for (at, _), seat in list(process.seats.items())
            if self.grant.cards[at].uuid == card
        ]
        status = rm.OK
        for seat in seats:
            status = (seat.resume() if on else seat.suspend()) or status
        if status != rm.OK and not on:
            for seat in seats:
                seat.resume()
        return status

    def _changed(self, before: bool, at_s: float) -> list[Event]:
        if before == self.working():
            return []
        return [Idle(at_s, self.name) if before else Work(at_s, self.name)]

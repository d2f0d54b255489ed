"""One container as the policy of GPU time sees it: its processes, their channels, and what it says about its work.

The parts that decide nothing themselves: a tenant adds up what its processes say, and stops or starts all of them on a card.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from enum import Enum
from math import inf
from typing import Final

from arbiter.budget import Budget
from arbiter.page import Page
from arbiter.seat import Runs, Seat
from vgpu import rm, wire
from vgpu.errors import BadDocument
from vgpu.grant import Grant
from vgpu.names import CLASSES
from vgpu.trace import Begin, End, Event, Hint, Idle, Tenant, Work

BEST_EFFORT: Final = CLASSES[-1]
PROCESSES_LIMIT: Final = 1024
"""Of one container that tell of turns. As for leases."""
FREE_WEIGHT: Final = 100.0
"""Weight of who asked for no percentage: as much as a whole card's."""
SEATS_LIMIT: Final = 128
"""Of one process, as many as the library tells of. Each keeps a descriptor of ours."""
ALL_SEATS_LIMIT: Final = 1024
"""Of one container."""


@dataclass(slots=True)
class Process:
    """One connection that tells of turns."""

    pid: int
    working: bool = False
    yields: bool = False
    worked_off: bool = False
    """Its work began when the container had been stopped for long."""
    seats: dict[tuple[int, int], Seat] = field(default_factory=dict)
    """By card of the grant and client."""


class Trial(Enum):
    """Of a driver that nobody has tried, on the channels that a tenant has told of last."""

    DUE = "due"
    RUNS = "runs"
    DONE = "done"


class TenantTurns:
    """A container that has channels on at least one card. `name` is its grant directory's."""

    def __init__(self, name: str, grant: Grant, page: Page | None, at_s: float, *, untried: bool = False) -> None:
        self.name = name
        self._untried = untried
        self.trial = Trial.DONE
        self.grant = grant
        self.page = page
        """None when the grant is gone: its processes are being hung up on."""
        self.budget = Budget(at_s)
        self.processes: dict[int, Process] = {}
        self.left: list[Seat] = []
        """Given up: to be closed outside the lock."""
        self.joined: Tenant | None = None
        """As the policy knows it; None = not, for want of channels."""
        self.wanted = True
        """Should it be on?"""
        self.shown_on: bool | None = None
        """As the policy was told last."""
        self.trouble = ""
        """Why it cannot be suspended; empty = it can."""
        self.told_partial = False
        self.complained_at_s = -inf
        self.failures = 0
        """Suspends that the driver refused."""
        self.ineffective = 0
        """Suspends during which its work ended all the same."""
        self.heals = 0
        self.healed_at_s = at_s
        self.off_since_s = inf

    def terms(self) -> Tenant | None:
        """What the policy is told; None when there is nothing to switch."""
        cards = {self.grant.cards[card].uuid for process in self.processes.values() for card, _ in process.seats}
        if not cards:
            return None
        percent = max(card.core_percent for card in self.grant.cards if card.uuid in cards)
        yields = any(process.yields for process in self.processes.values())
        klass = BEST_EFFORT if yields else self.grant.klass
        return Tenant(frozenset(cards), klass, self.grant.level, percent, percent or FREE_WEIGHT)

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

    def leaves(self, number: int, at_s: float) -> tuple[list[Seat], list[Event]]:
        """A process is not heard any more: its seats, which the caller closes, and what that means for the container."""
        before = self.working()
        seats = list(self.processes.pop(number).seats.values())
        return seats, self._changed(before, at_s)

    def sits(self, number: int, channels: wire.Channels, fd: int | None) -> None:
        """A process has these channels from now on; the descriptor is ours. Raises BadDocument, and then closes it."""
        seats, key = self.processes[number].seats, (channels.card, channels.client)
        try:
            if channels.card >= len(self.grant.cards):
                raise BadDocument(
                    f"packet names card {channels.card}: this container has {len(self.grant.cards)}, from 0"
                )
            if channels.compute and fd is None:
                raise BadDocument("packet CHANNELS comes without a descriptor")
            if key not in seats and channels.compute and self._is_full(len(seats)):
                raise BadDocument(
                    f"packet CHANNELS names one client too many: at most {SEATS_LIMIT} of a process and {ALL_SEATS_LIMIT} of a container"
                )
            taken, fd = fd, None
            fresh = Seat(channels, taken) if taken is not None else None
        finally:
            if fd is not None:
                os.close(fd)
        old = seats.pop(key, None)
        if old is not None:
            self.left.append(old)
            old.owes = fresh is not None and fresh.partial and old.runs is not Runs.ON
        if fresh is not None:
            seats[key] = fresh

    def sweep(self) -> list[Seat]:
        """Lists that were replaced, to be closed by the caller without the lock. What of them is still there is in the new list,
        which is started first; `owes` where that list is partial."""
        left, self.left = self.left, []
        return left

    @property
    def urgent(self) -> bool:
        """May it announce its work?"""
        return self.grant.klass == CLASSES[0]

    def working(self) -> bool:
        """Has any of its processes work, as they say?"""
        return any(process.working for process in self.processes.values())

    @property
    def to_run(self) -> bool:
        """Are all its channels to be enabled? Also of one who is to be off, where a list does not hold them all or nobody knows
        yet whether its driver suspends."""
        return self.wanted or self.partial or self.trial is not Trial.DONE

    @property
    def partial(self) -> bool:
        """Has any of its processes more channels on a card than a list holds?"""
        return any(seat.partial for process in list(self.processes.values()) for seat in list(process.seats.values()))

    def seats(self, card: str) -> list[Seat]:
        """Of all its processes, on this card."""
        return [
            seat
            for process in list(self.processes.values())
            for (at, _), seat in list(process.seats.items())
            if self.grant.cards[at].uuid == card
        ]

    def is_on(self, card: str) -> bool:
        """Does everything run there?"""
        return all(seat.runs is Runs.ON for seat in self.seats(card))

    def is_off(self, card: str) -> bool:
        """Is everything stopped there?"""
        return all(seat.runs is Runs.OFF for seat in self.seats(card))

    def to_do(self, card: str) -> bool | None:
        """What to switch there: on, off, or nothing. An enable that is owed comes first, also for one who is to be off."""
        runs = {seat.runs for seat in self.seats(card)}
        if Runs.UNSURE in runs and not self.trouble:
            return True
        if self.to_run:
            return True if Runs.OFF in runs else None
        return False if Runs.ON in runs and not self.trouble else None

    def doubt(self, card: str) -> None:
        """Somebody else may have started what we stopped."""
        for seat in self.seats(card):
            if seat.runs is Runs.OFF:
                seat.runs = Runs.UNSURE

    def changed_channels(self) -> None:
        """What is known of its channels is of others."""
        self.trouble = ""
        self.trial = Trial.DUE if self._untried else Trial.DONE

    def to_try(self, card: str) -> bool:
        """Is it time to try the driver on its channels there? They all run then."""
        return self.trial is Trial.DUE and not self.trouble and bool(self.seats(card)) and self.is_on(card)

    def try_out(self, card: str) -> str:
        """Stop and start its processes on a card, one after the other. Why it cannot be suspended; empty = it can. As `switch`."""
        return next((why for seat in self.seats(card) if not seat.partial and (why := seat.try_out())), "")

    def switch(self, card: str, on: bool) -> int:
        """Start or stop all its processes on a card: the driver's status. A stop that fails is taken back whole.

        Blocks for about half a millisecond a process. Called without any lock, so the seats are those of a moment ago: one that
        was closed meanwhile answers with an error, and its process is gone. To start touches what does not run for certain; who
        is to be off has only what is unsure started, and is stopped next.
        """
        status = rm.OK
        for seat in self.seats(card):
            if not on:
                status = seat.suspend() or status
            elif seat.runs is Runs.UNSURE or (seat.runs is Runs.OFF and self.to_run):
                status = seat.resume() or status
        if status != rm.OK and not on:
            for seat in self.seats(card):
                if seat.runs is Runs.OFF:
                    seat.resume()
        return status

    def _is_full(self, of_process: int) -> bool:
        return (
            of_process >= SEATS_LIMIT
            or sum(len(process.seats) for process in self.processes.values()) >= ALL_SEATS_LIMIT
        )

    def _changed(self, before: bool, at_s: float) -> list[Event]:
        if before == self.working():
            return []
        return [Idle(at_s, self.name) if before else Work(at_s, self.name)]

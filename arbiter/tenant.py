"""One container as the policy of GPU time sees it: its processes, their channels, and what it says about its work.

The parts that decide nothing themselves: a tenant adds up what its processes say, and stops or starts all of them on a card.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Final

from arbiter.budget import Budget
from arbiter.identity import Identity, named
from arbiter.page import Page
from arbiter.seat import Runs, Seat
from arbiter.timer import now_s
from vgpu import rm, wire
from vgpu.decay import Decay
from vgpu.effect import Effect
from vgpu.enforcement import NO_CHANNELS_S
from vgpu.errors import BadDocument
from vgpu.grant import Grant
from vgpu.healing import Healing
from vgpu.names import CLASSES
from vgpu.status import TurnStatus
from vgpu.trace import Begin, End, Event, Hint, Idle, Late, Tenant, Work
from vgpu.trial import Suspending
from vgpu.untold import Doubt
from vgpu.usage import Usage

BEST_EFFORT: Final = CLASSES[-1]
PROCESSES_LIMIT: Final = 1024
"""Of one container that tell of turns. As for leases."""
FREE_WEIGHT: Final = 100.0
"""Weight of who asked for no percentage: as much as a whole card's."""
SEATS_LIMIT: Final = 128
"""Of one process, as many as the library tells of. Each keeps a descriptor of ours."""
ALL_SEATS_LIMIT: Final = 1024
"""Of one container."""
INEFFECTIVE_S: Final = 0.020
"""Work that ends so long after a suspend was not suspended. Specified: the driver takes one millisecond."""
EXCUSED_S: Final = 2.0
"""So long after a silence of ours a process may say that it resumed itself in it. Guessed: it looks every 0.2 s."""
TRY_AGAIN_S: Final = 10.0
TRY_AGAIN_MOST_S: Final = 600.0
"""A suspend that the driver refused is tried again after so long, and after twice as long each time. Guessed."""
LOOK_MOST_S: Final = 2.0
"""After a longer pause between looks the driver's count does not reach back to the last one, and messages may be unread: then only
what speaks for the container counts. As far as a look goes back."""
FORGET_S: Final = 10.0
"""A verdict that no look has confirmed for so long ends. Guessed: some looks."""
FADE: Final = 0.5
"""What of earlier looks counts in `pace`. Guessed: a sample that comes late is in the next look."""
PARTIAL: Final = f"a process has more than {rm.CHANNELS_LIMIT} compute channels on a card, which one list cannot name"
MUTE: Final = "a process has had a context for two seconds and reported no channels"


@dataclass(slots=True)
class Process:
    """One connection that tells of turns."""

    pid: int
    pid_in_container: int = 0
    working: bool = False
    kernels_only: bool = False
    """Of what it launched since it was idle: no copy, fill or wait, which the driver's count does not show."""
    drained: bool = False
    """What it has to do waits at the gate, and nothing of it is on the GPU."""
    yields: bool = False
    began_s: float = inf
    """When its last work began."""
    worked_off: bool = False
    """Its work began when the container had been stopped for long."""
    resuming_until_s: float = -inf
    """It is about to resume its own channels, and nothing follows from its word until it has, or until then."""
    seats: dict[tuple[int, int], Seat] = field(default_factory=dict)
    """By card of the grant and client."""

    @property
    def runs(self) -> bool:
        """May any of its channels run?"""
        return any(seat.runs is not Runs.OFF for seat in self.seats.values())


class TenantTurns:
    """A container that has channels on at least one card. `name` is its grant directory's."""

    def __init__(
        self,
        name: str,
        grant: Grant,
        page: Page | None,
        at_s: float,
        *,
        copies: bool = False,
        holds: bool = False,
        clock: Callable[[], float] = now_s,
    ) -> None:
        self.name = name
        self._clock = clock
        self._holds = holds
        """Does anything follow from a verdict on its word?"""
        self._copies = copies
        """Are its copy channels stopped with the others while it is best-effort?"""
        self.suspending = Suspending()
        """What the trial of this boot says of its GPUs."""
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
        self.shown_working: bool | None = None
        """The same."""
        self.trouble = ""
        """Why it cannot be suspended; empty = it can."""
        self.told_partial = False
        self.told_no_trial = False
        self.spared: Mapping[int, str] = {}
        """Host pids of its processes that are never suspended, and why."""
        self.contexts_s: dict[tuple[Identity, int], float] = {}
        """Since when each process has had a context on each card of the grant."""
        self.mute: frozenset[int] = frozenset()
        """Cards of the grant on which a process has had a context for long and reported no channels."""
        self.complained_at_s = -inf
        self.failures = 0
        """Suspends that the driver refused."""
        self.effect = Effect()
        """What its word says of suspends."""
        self.behind: set[int] = set()
        """Connections on which something may wait that was said before what is known now."""
        self.doubted_at_s = -inf
        """When it was last known that nobody had told it that we live."""
        self.resumes = 0
        """Times that its processes said that they resumed themselves."""
        self._try_at_s, self._try_wait_s = inf, TRY_AGAIN_S
        """When the driver is asked again to suspend it, after a refusal, and how long after."""
        self.heals = 0
        self.healing = Healing(at_s)
        self.off_since_s = inf
        self.loose = False
        """May channels of it run though it is suspended? They came meanwhile, or the others are still being resumed."""
        self.loose_since_s = inf
        """Since when a process has work on such channels; inf = none has."""
        self.unheard = False
        """It has used its budget up and is not listened to: meanwhile it counts as working."""
        self.decay = Decay()
        """What ends its work without a word."""
        self.suspicion = Doubt()
        """What the driver's count says against its word."""
        self.seen_s: float | None = None
        """GPU time that the driver counted of its processes; None = it was not asked yet."""
        self._told_s = self._silent_s = 0.0
        """How long it might run and said that it works; and that it does not."""
        self._resumed = False
        """It ran by itself since the last look, for nobody knows how long."""
        self._told_until_s = at_s
        """Up to when that is added up."""
        self._weighed: tuple[float, float, float] | None = None
        """When its word was compared last, and `_told_s` and `_silent_s` then."""
        self._beyond_s = self._of_silent_s = 0.0
        """Of the last looks: seen beyond what it told, in how much silent time."""
        self.pace = 1.0
        """Part of its silent time in which the driver saw it compute, 0 to 1: what that time costs it."""

    @property
    def cards(self) -> frozenset[str]:
        """Where it has channels, as the policy knows it."""
        return self.joined.cards if self.joined is not None else frozenset()

    def depends_on(self) -> frozenset[str]:
        """Cards whose threads read its messages or switch it."""
        return self.cards | {self.grant.cards[0].uuid}

    def depends_on_card(self, card: str) -> bool:
        """Is it one of `depends_on`? Asked of every tenant at every turn of every thread."""
        return card in self.cards or card == self.grant.cards[0].uuid

    def terms(self) -> Tenant | None:
        """What the policy is told; None when there is nothing to switch."""
        seated = {card for process in self.processes.values() for card, _ in process.seats}
        cards = {self.grant.cards[card].uuid for card in seated | self.mute}
        if not cards:
            return None
        percent = max(card.core_percent for card in self.grant.cards if card.uuid in cards)
        yields = any(process.yields for process in self.processes.values())
        silent = self.distrusted and not self.tells_work()  # what it does unsaid goes first of nobody's
        klass = BEST_EFFORT if yields or silent else self.grant.klass
        pace = self.pace if silent else 1.0
        return Tenant(frozenset(cards), klass, self.grant.level, percent, percent or FREE_WEIGHT, pace)

    def says(self, number: int, activity: wire.Activity, at_s: float) -> list[Event]:
        """What a process announces for the whole container. Whether that works now is `news`."""
        self._add_up(at_s)
        process = self.processes[number]
        match activity.what:
            case wire.What.WORK | wire.What.IDLE:
                process.working, process.drained = activity.what == wire.What.WORK, False
                process.kernels_only = process.working and bool(activity.value & wire.KERNELS_ONLY)
                process.began_s = at_s if process.working else inf
                self._word()
                return self._loose_work(process, activity, at_s)
            case wire.What.STILL:
                process.kernels_only = process.kernels_only and bool(activity.value & wire.KERNELS_ONLY)
                self._word()
                return []
            case wire.What.DRAINED:
                process.drained = process.working
                return []
            case wire.What.YIELD | wire.What.END_YIELD:
                process.yields = activity.what == wire.What.YIELD
                return []
            case wire.What.HINT:
                return [Hint(at_s, self.name, min(activity.value, 10_000_000) / 1e6)] if self.urgent else []
            case wire.What.BEGIN_SECTION:
                return [Begin(at_s, self.name)] if self.urgent else []
            case _:
                return [End(at_s, self.name)] if self.urgent else []

    def leaves(self, number: int, at_s: float) -> list[Seat]:
        """A process is not heard any more: its seats, which the caller closes."""
        self._add_up(at_s)
        self.behind.discard(number)
        return list(self.processes.pop(number).seats.values())

    def hears(self, at_s: float, *, unheard: bool) -> None:
        """It is not listened to for a while, or is again."""
        self._add_up(at_s)
        self.unheard = unheard
        self.behind.update(self.processes)

    def weigh(self, at_s: float, seen_s: float) -> bool:
        """Since the last look the driver saw its processes compute for so long. Whether the verdict changed."""
        self._add_up(at_s)
        since, self._weighed = self._weighed, (at_s, self._told_s, self._silent_s)
        if since is None:
            self.seen_s = 0.0
            return False
        self.seen_s = (self.seen_s or 0.0) + seen_s
        passed_s, told_s, silent_s = (now - then for now, then in zip(self._weighed, since, strict=True))
        if passed_s > LOOK_MOST_S or self._resumed:
            self._resumed = False
            return self.suspicion.look(passed_s, told_s, 0.0)
        self._beyond_s = FADE * self._beyond_s + seen_s - told_s
        self._of_silent_s = FADE * self._of_silent_s + silent_s
        if self._of_silent_s > 0:
            self.pace = round(min(1.0, max(0.0, self._beyond_s / self._of_silent_s)), 2)
        return self.suspicion.look(passed_s, told_s, seen_s)

    def decays(self, at_s: float, seen_s: float | None) -> bool:
        """Since the last look the driver saw its processes compute for so long; None = it might have seen nothing of them. Whether its
        work ended with that."""
        self._add_up(at_s)
        return self.decay.look(self._told_s, seen_s) and any(process.working for process in self.processes.values())

    def _word(self) -> None:
        """One of its processes said something of its work: what others have launched counts anew with it."""
        open_ = [process for process in self.processes.values() if process.working]
        self.decay.word(self._told_s, kernels_only=bool(open_) and all(process.kernels_only for process in open_))

    def forgets(self, at_s: float) -> bool:
        """A verdict ends when no look has confirmed it for long. Whether one did."""
        if not self.suspicion.proven or self._weighed is None or at_s - self._weighed[0] < FORGET_S:
            return False
        self.suspicion.drop()
        return True

    def stands(self, at_s: float, *, on: bool) -> None:
        """It is on or off from now on, on all of its cards."""
        self._add_up(at_s)
        if on:
            self._stood(at_s)
        self.shown_on = on
        self.off_since_s = inf if on else at_s
        self.healing.stands(at_s, on=on)

    def _stood(self, at_s: float) -> None:
        """It was suspended until now: with work that did not end?"""
        begun_s = min((process.began_s for process in self.processes.values() if process.working), default=inf)
        seconds = at_s - max(self.off_since_s, begun_s)
        unread = any(number in self.behind for number, process in self.processes.items() if process.working)
        if self.shown_on is False and seconds >= INEFFECTIVE_S and not self.gates and not unread:
            self.effect.stood(seconds)
        for process in self.processes.values():
            process.worked_off = False

    def ends(self, number: int, what: wire.What, at_s: float) -> bool:
        """A process said this. Work that began and ended in a container that has been suspended for long was not suspended: whether that
        changed the verdict. Of what was said before a stall was over nothing is known, and while a process runs whose channels are not
        suspended yet, or not even reported, nothing follows."""
        process = self.processes[number]
        if number in self.behind or self.gates or self.loose or at_s < process.resuming_until_s:
            process.worked_off = False
            return False
        if what is wire.What.WORK:
            process.worked_off = at_s - self.off_since_s > INEFFECTIVE_S and bool(process.seats)
        elif what is wire.What.IDLE and process.worked_off and self.shown_on is False:
            process.worked_off = False
            return self.effect.ended(at_s)
        return False

    def news(self, at_s: float) -> list[Event]:
        """Whether it has work, when that is not what the policy was told last."""
        if self.working() is self.shown_working:
            return []
        self.shown_working = self.working()
        return [Work(at_s, self.name) if self.shown_working else Idle(at_s, self.name)]

    def caught(self, at_s: float, *, stopped: bool) -> list[Event]:
        """All of it is suspended again, if `stopped`, or resumed: what ran meanwhile is paid for."""
        if self.loose and stopped and self.off_since_s < inf:
            self.off_since_s = at_s
        self.loose = False
        return self._paid(at_s)

    def _loose_work(self, process: Process, activity: wire.Activity, at_s: float) -> list[Event]:
        """Work began or ended: what of it was told late, or is on channels that run though the container is suspended, is paid for."""
        if process.working and self.loose and process.runs:
            self.loose_since_s = min(self.loose_since_s, at_s)
        if process.working:
            late_s = (activity.value >> wire.LATE_SHIFT) / 1e6
            return [Late(at_s, self.name, late_s)] if late_s else []
        over = self.loose_since_s < inf and not any(one.working and one.runs for one in self.processes.values())
        return self._paid(at_s) if over else []

    def _paid(self, at_s: float) -> list[Event]:
        since_s, self.loose_since_s = self.loose_since_s, inf
        return [Late(at_s, self.name, at_s - since_s)] if since_s < at_s and self.shown_on is False else []

    def sits(self, number: int, channels: wire.Channels, fd: int | None, at_s: float) -> None:
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
            new = Seat(channels, taken, copies=self._copies) if taken is not None else None
        finally:
            if fd is not None:
                os.close(fd)
        old = seats.pop(key, None)
        if old is not None:
            self.left.append(old)
            old.owes = new is not None and new.partial and old.runs is not Runs.ON
        if new is not None:
            if self.shown_on is False:
                self.loose = True
                self.loose_since_s = (
                    min(self.loose_since_s, at_s) if self.processes[number].working else self.loose_since_s
                )
            new.partial |= self.processes[number].pid in self.spared
            if old is not None:
                new.runs = Runs.UNSURE  # whatever it says of itself: we may have stopped what the old list names
            seats[key] = new

    def spare(self, pids: Mapping[int, str]) -> None:
        """From now on these processes are never suspended. One that is suspended is resumed."""
        self.spared = pids
        for process in self.processes.values():
            for seat in process.seats.values():
                seat.partial = seat.channels.unlisted or process.pid in pids

    def sweep(self) -> list[Seat]:
        """Lists that were replaced, to be closed by the caller without the lock. What of them is still there is in the new list,
        which is started first; `owes` where that list is partial."""
        left, self.left = self.left, []
        return left

    @property
    def urgent(self) -> bool:
        """May it announce its work?"""
        return self.grant.klass == CLASSES[0]

    def tells_work(self) -> bool:
        """Has any of its processes work, as they say and nothing contradicts? What is not listened to may say so."""
        return self.unheard or (not self.decay.ended and self.says_work())

    def says_work(self) -> bool:
        """Has any of its processes work, by its own word? Work that the driver does not see stands still, perhaps."""
        return any(process.working for process in self.processes.values())

    def working(self) -> bool:
        """Does it count as having work? Always, when its word does not count."""
        return self.tells_work() or (self.distrusted and bool(self.processes))

    @property
    def distrusted(self) -> bool:
        """Does its word not count, because the driver has seen it compute without one?"""
        return self._holds and self.suspicion.proven

    @property
    def gates(self) -> bool:
        """Is its new work held back while it is to be off?"""
        return self.denied or bool(self.trouble) or self.partial or bool(self.mute) or self.effect.gates

    @property
    def empty(self) -> bool:
        """Has none of its processes a channel, nor work or a context that says that there are some?"""
        return not self.mute and not any(process.seats or process.working for process in list(self.processes.values()))

    @property
    def drained(self) -> bool:
        """Does all that it has to do wait at its gate, as its processes say and nothing contradicts? Then it is as if suspended."""
        working = [process for process in self.processes.values() if process.working]
        return bool(working) and all(process.drained for process in working) and not (self.unheard or self.distrusted)

    def status(self, usage: Usage, credit_s: float, at_s: float) -> TurnStatus:
        """For people and metrics."""
        return TurnStatus(
            on=self.shown_on is not False,
            working=self.tells_work(),
            processes=sum(1 for process in self.processes.values() if process.seats),
            asked_percent=max(card.core_percent for card in self.grant.cards),
            on_s=usage.on_s,
            off_s=usage.off_s,
            capped_s=usage.capped_s,
            suspends=usage.suspends,
            trouble=self.suspending.why or self.trouble or self._why_partial(),
            mode="gate" if self.gates or self.effect.doubted else "suspend",
            heals=self.heals,
            clearing_s=usage.clearing_s,
            suspended_s=usage.suspended_s,
            arrivals=usage.arrivals,
            credit_s=credit_s,
            untold=self.suspicion.proven,
            stopped=self.healing.stopped(at_s),
            seen_s=self.seen_s,
            resumes=self.resumes,
        )

    @property
    def to_run(self) -> bool:
        """Are all its channels to be enabled? Also of one who is to be off, where a list does not hold them all or its driver does
        not suspend."""
        return self.wanted or self.partial or self.denied or bool(self.mute)

    def falls_mute(self, at_s: float) -> bool:
        """Whether it is otherwise than before on which cards a process reports no channels."""
        seated = {(named(p.pid, p.pid_in_container), card) for p in self.processes.values() for card, _ in p.seats}
        before, self.mute = (
            self.mute,
            frozenset(
                card
                for (process, card), since in self.contexts_s.items()
                if at_s - since >= NO_CHANNELS_S and (process, card) not in seated and card < len(self.grant.cards)
            ),
        )
        return self.mute != before

    def _why_partial(self) -> str:
        if self.unlisted:
            return PARTIAL
        return (
            MUTE
            if self.mute
            else next((self.spared[p.pid] for p in self.processes.values() if p.pid in self.spared), "")
        )

    @property
    def partial(self) -> bool:
        """Has any of its processes more channels on a card than a list holds, or is one never suspended?"""
        return any(seat.partial for process in list(self.processes.values()) for seat in list(process.seats.values()))

    @property
    def unlisted(self) -> bool:
        """Has any of its processes more channels on a card than a list holds?"""
        return any(seat.channels.unlisted for process in self.processes.values() for seat in process.seats.values())

    @property
    def denied(self) -> bool:
        """Is it never suspended, because of its GPUs or their driver? Then the driver is asked to resume nothing either, unless it is
        stopped: what a call does there is not known."""
        return self.suspending.reason is not None

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
        if Runs.UNSURE in runs and not self.trouble and not self.denied:
            return True
        if self.to_run:
            return True if Runs.OFF in runs else None
        return False if Runs.ON in runs and not self.trouble else None

    def resumed(self, number: int, at_s: float, *, about_to: bool, silent: bool) -> bool:
        """A process says that it resumes itself, as nobody told it that we live. Where that is not so, it is as if a suspend had no effect:
        whether that changed the verdict. It is suspended again in any case."""
        self.resumes += not about_to
        self.processes[number].resuming_until_s = at_s + EXCUSED_S if about_to else -inf
        excused = silent or at_s - self.doubted_at_s < EXCUSED_S
        doubted_at_s = self.doubted_at_s
        self.doubt(at_s)
        if excused:
            return False
        self.doubted_at_s = doubted_at_s
        self.processes[number].resuming_until_s = -inf
        return not about_to and self.effect.ended(at_s)

    def doubt(self, at_s: float) -> None:
        """It may have started what we stopped, as nobody told it that we live; then on all of its cards."""
        self.off_since_s, self._resumed, self.doubted_at_s = inf, True, at_s
        self.behind.update(self.processes)
        self.healing.heard(at_s)
        for process in self.processes.values():
            process.worked_off = False
            for seat in process.seats.values():
                if seat.runs is Runs.OFF:
                    seat.runs = Runs.UNSURE

    def refused(self, at_s: float, why: str) -> None:
        """The driver refused to suspend or resume it. It is asked again later, or when there are other channels."""
        self.trouble = self.trouble or why
        self._try_at_s = at_s + self._try_wait_s
        self._try_wait_s = min(2 * self._try_wait_s, TRY_AGAIN_MOST_S)

    def suspended(self) -> None:
        """The driver suspended it."""
        self._try_wait_s = TRY_AGAIN_S

    def tries(self, at_s: float) -> bool:
        """Whether it is tried from now on if it can be suspended, after it could not for a while."""
        again = bool(self.trouble) and at_s >= self._try_at_s
        if again:
            self.trouble = ""
        return self.effect.tries(at_s) or again

    def changed_channels(self) -> None:
        """What is known of its channels is of others."""
        self.trouble = ""

    def switch(self, card: str, on: bool) -> int:
        """Start or stop all its processes on a card: the driver's status. A stop that fails is taken back whole.

        Blocks for about half a millisecond a process. Called without any lock, so the seats are those of a moment ago: one that
        was closed meanwhile answers with an error, and its process is gone. To stop touches what runs for certain. To start touches what does not run for certain; who
        is to be off has only what is unsure started, and is stopped next.
        """
        seats, status = self.seats(card), rm.OK
        if not on:
            return self.stop(seats)
        for seat in seats:
            if seat.runs is Runs.UNSURE or (seat.runs is Runs.OFF and self.to_run):
                status = seat.resume() or status
                if (
                    self.shown_on is False and not self.loose
                ):  # the first of them runs while the others are being resumed
                    self.loose = True
                    self.loose_since_s = self._clock() if self.says_work() else inf
        return status

    def stop(self, seats: Sequence[Seat]) -> int:
        """Stop what runs for certain of these: the driver's status. One that fails is taken back whole; a partial list is left alone.

        Called without any lock, as `switch`.
        """
        status, joined = rm.OK, self.joined
        copies = self._copies and joined is not None and joined.klass == BEST_EFFORT
        for seat in seats:
            if seat.runs is Runs.ON and not seat.partial:
                status = seat.suspend(copies=copies) or status
        if status != rm.OK:
            for seat in seats:
                if seat.runs is Runs.OFF:
                    seat.resume()
        return status

    def _is_full(self, of_process: int) -> bool:
        return (
            of_process >= SEATS_LIMIT
            or sum(len(process.seats) for process in self.processes.values()) >= ALL_SEATS_LIMIT
        )

    def _add_up(self, at_s: float) -> None:
        """Nothing is told while it is off: it does not run then, so its word explains nothing that the driver saw."""
        if at_s <= self._told_until_s:
            return
        passed_s, self._told_until_s = at_s - self._told_until_s, at_s
        if self.shown_on is False and not self.gates:
            return
        if self.tells_work() and not self.drained:
            self._told_s += passed_s
        else:
            self._silent_s += passed_s

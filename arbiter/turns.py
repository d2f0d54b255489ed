"""Carries out who may run on the node's GPUs: hears of work, asks the policy, and says what is to be switched.

`vgpu.share` decides; this module moves what it hears to it and what it decides to the cards' threads (`arbiter.lane`). Only
bookkeeping is done under the lock, never a switch. Whoever holds the server's lock may take this one, never the other way round.

It fails open: a tenant that cannot be suspended stays on and is asked to hold new work back (the page's gate), and when a
thread fails everything is started and the arbiter ends, so that a fresh one takes over.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Set
from math import inf
from typing import Final

from arbiter.complaints import tell_of_partial, tell_of_stall
from arbiter.connection import TOO_MANY, Connection
from arbiter.counts import Counts
from arbiter.identity import Identity
from arbiter.lanes import Lanes
from arbiter.orders import Orders
from arbiter.page import Page
from arbiter.process import PROCESSES_LIMIT, Process
from arbiter.pulse import Pulse, Stalls
from arbiter.seat import Runs, Seat
from arbiter.tenant import TenantTurns
from arbiter.tenants import Tenants
from arbiter.timer import now_s
from arbiter.trust import Trust
from arbiter.watchdog import Watchdog
from vgpu import rm, wire
from vgpu.decision import Decision
from vgpu.errors import BadDocument
from vgpu.grant import Grant
from vgpu.share import Share
from vgpu.status import TurnStatus
from vgpu.timing import Settings
from vgpu.trace import Event, Join, Leave, Stalled, Switched
from vgpu.trial import Suspending

EVENTS_KEPT: Final = 4096
"""Of the trace, which an admin may ask for. Guessed: some seconds of a busy node."""


class Turns:
    """All tenants with channels on this node. `failed` is called, from a thread of ours, when one of them fails."""

    def __init__(
        self,
        failed: Callable[[], None],
        settings: Settings | None = None,
        *,
        awake_s: float = 0.1,
        heal_s: float = 0.1,
        suspending: Callable[[Iterable[str]], Suspending] = lambda _: Suspending(),
        copies: bool = False,
        hold_untold: bool = False,
        processes: int = PROCESSES_LIMIT,
        clock: Callable[[], float] = now_s,
    ) -> None:
        self.clock = clock
        self.pulse, self.stalls = Pulse(clock), Stalls()
        self.lock = threading.Lock()
        self.share = Share(settings)
        self.trace: deque[Event] = deque(maxlen=EVENTS_KEPT)
        self.tenants = Tenants()
        self.counts = Counts()
        self.ending = False
        """Nobody is stopped any more, and everybody started."""
        self._failed, self._awake_s, self._copies = failed, awake_s, copies
        self._hold_untold, self._processes = hold_untold, processes
        self.lanes = Lanes(self)
        self.trust = Trust(self.counts, suspending)
        self.watchdog = Watchdog(self.tenants.depending, self.counts, heal_s)
        self._decision = Decision(frozenset(), {}, {})
        self._undecided = True
        """Has something happened since?"""
        self.orders = Orders(self.share.lead_s)

    def adopt(self, name: str, grant: Grant, page: Page, connection: Connection) -> None:
        """A connection of a process that tells of turns; ours from here on."""
        with self.lock:
            tenant = self.tenants.get(name)
            if tenant is None:
                tenant = TenantTurns(
                    name, grant, page, self.clock(), copies=self._copies, holds=self._hold_untold, clock=self.clock
                )
                self.tenants.add(tenant)
                self.trust.judge(tenant, self.clock())
            most = min(self._processes, PROCESSES_LIMIT)
            if self.ending or len(tenant.processes) >= most:
                connection.refuse(TOO_MANY, f"more than {most} processes of one container")
                connection.sock.close()
                return
            tenant.processes[connection.number] = Process(connection.pid, connection.pid_in_container)
            self.lanes.reader_of(tenant).take(tenant, connection)

    def change(self, name: str, grant: Grant) -> None:
        """The same container, with other terms."""
        with self.lock:
            tenant = self.tenants.get(name)
            if tenant is not None:
                tenant.grant = grant
                self.tenants.moved()
                self.orders.forget()
                self._know(tenant)
                self._decide()

    def never_suspend(self, name: str, pids: Mapping[int, str]) -> None:
        """These processes of a container, by host pid, and no others, for these reasons: `arbiter.spared`."""
        with self.lock:
            tenant = self.tenants.spare(name, pids)
            if tenant is not None:
                self._obstructed(tenant)

    def contexts(self, name: str, begun_s: Mapping[tuple[Identity, int], float]) -> None:
        """Since when each process of a container has had a context on each card of its grant, by `now_s`."""
        with self.lock:
            self.tenants.contexts(name, begun_s)

    def drop(self, name: str) -> None:
        """The grant is gone, or another container's: hang up on its processes. Its page may be closed after this."""
        with self.lock:
            tenant = self.tenants.remove(name)
            if tenant is None:
                return
            if tenant.page is not None:
                tenant.page.show_turn(off=False)
            tenant.page, tenant.wanted = None, True
            if tenant.joined is not None:
                self._apply(Leave(self.clock(), name))
            if tenant.processes:
                self.lanes.reader_of(tenant).hang_up(tenant)

    def statuses(self) -> dict[str, TurnStatus]:
        """What every tenant got, by name."""
        with self.lock:
            self._decide()  # what is shown is of now
            return {
                name: tenant.status(self.share.usage(name), self.share.credit_s(name), self.clock())
                for name, tenant in self.tenants.items()
                if tenant.joined is not None
            }

    def to_report(self) -> set[str]:
        """Those of whom `statuses` says that they compute without a word, or are stopped by another."""
        with self.lock:
            return self.tenants.to_report(self.clock())

    def recorded(self) -> list[Event]:
        """The last events, oldest first. When none was forgotten yet, a replay decides as this node did."""
        with self.lock:
            return list(self.trace)

    def watched(self) -> dict[str, tuple[frozenset[str], frozenset[int]]]:
        """Cards and host pids of every tenant whose word the driver's count is to be compared with."""
        with self.lock:
            return {
                name: (tenant.joined.cards, frozenset(process.pid for process in tenant.processes.values()))
                for name, tenant in self.tenants.items()
                if tenant.joined is not None
            }

    def witness(self, seen_s: Mapping[str, float], whole: Set[str], at_s: float) -> None:
        """It is `at_s`, and since the last look the driver saw these compute for so many seconds; of `whole` it saw all there was."""
        with self.lock:
            if self.ending:
                return
            self.trust.checked(at_s)
            for name, seconds in seen_s.items():
                tenant = self.tenants.get(name)
                if tenant is None or tenant.joined is None or tenant.page is None:
                    continue
                self.trust.weigh(tenant, at_s, seconds, whole=name in whole)
                self._know(tenant)
            self._decide()

    def checks(self, at_s: float) -> bool:
        """Is what tenants say compared with what the driver counts?"""
        return self.trust.checks(at_s)

    def close(self) -> None:
        """Start everybody and end the threads."""
        with self.lock:
            self.ending = self._undecided = True
            self.orders.forget()
            lanes = self.lanes.all()
        for lane in lanes:
            lane.stop()
        self.pulse.close()
        for seat in self._release_all():
            seat.close()

    # Under the lock, from the cards' threads.

    def hear(
        self, tenant: TenantTurns, connection: Connection, message: wire.Message, fd: int | None, at_s: float
    ) -> None:
        """A message of a process came at `at_s`, with a descriptor that is ours then. Raises BadDocument."""
        at_s = max(at_s, self.share.now_s)  # what others did meanwhile is in the books and stays before it
        self.watchdog.heard(tenant, message, at_s)
        still = isinstance(message, wire.Activity) and message.what is wire.What.STILL
        if self._awake_s and tenant.urgent and not still:
            self.lanes.stay_awake(tenant, at_s + self._awake_s)
        match message:
            case wire.Activity():
                self._weigh(tenant, connection.number, message, at_s)
                if tenant.page is not None:
                    for event in tenant.says(connection.number, message, at_s):
                        self._apply(event)
                    if tenant.gates:
                        self._show(tenant, 0.0)
            case wire.Channels():
                tenant.sits(connection.number, message, fd, at_s)
                tenant.obstacles.changed_channels()
                self.trust.judge(tenant, self.clock())
                self.orders.forget()
                tell_of_partial(tenant)
            case _:
                raise BadDocument(f"{type(message).__name__.upper()} has no place on a connection for turns")
        self._know(tenant, at_s)
        if isinstance(message, wire.Channels) and tenant.wanted:
            self._show(tenant, 0.0)  # one that is to be off is suspended first, and its gate stays shut until then

    def lose(self, tenant: TenantTurns, connection: Connection) -> list[Seat]:
        """A process hung up, or is hung up on: its seats, which are the caller's now."""
        seats = tenant.leaves(connection.number, self.clock())
        tenant.obstacles.changed_channels()  # what was known may have been of that process's
        self.orders.forget()
        self._know(tenant)
        self._show(tenant, 0.0)  # it may have been the one that still ran, or that did not run yet, or the last
        return seats

    def stopped(self, tenant: TenantTurns, at_s: float, status: int, took_s: float) -> None:
        """By an order, for what was said at `at_s` and has been heard since: the policy has it decided then, and it is done now."""
        self._decide(at_s)
        self.switched(tenant, False, status, took_s)

    def stalled(self, card: str, since_s: float, at_s: float) -> None:
        """The arbiter was not there for a card."""
        self.stalls.note(card, since_s, at_s)
        self._apply(Stalled(max(at_s, self.share.now_s), card, since_s))
        tell_of_stall(card, at_s - since_s)

    def give_orders(self, card: str) -> None:
        """Nothing is to be switched on a card now: what will be when a request comes?"""
        if not self.ending:
            self.orders.give(card, self.tenants.depending(card), self.tenants, self.share)

    def hush(self, tenant: TenantTurns, *, unheard: bool) -> None:
        """A tenant is not listened to for a while, or is again."""
        tenant.hears(self.clock(), unheard=unheard)
        self._know(tenant)

    def step(self, card: str) -> tuple[TenantTurns, bool] | None:
        """What to switch next on a card: stops first, so that nobody is started beside one who is to be alone."""
        if self._undecided or self.clock() >= self._decision.ask_again_s:
            self._decide()
        starts = None
        for tenant in self.tenants.depending(card):
            if card not in tenant.cards:
                continue  # it is only read here
            todo = tenant.to_do(card)
            if todo is False:
                return tenant, False
            if todo is True and (starts is None or not tenant.wanted):
                starts = tenant
        return None if starts is None else (starts, True)

    def switched(self, tenant: TenantTurns, on: bool, status: int, took_s: float) -> None:
        """A switch was made, or failed: then the tenant is on, and stays so until it tells of its channels anew."""
        self.counts.switches += 1
        if status == rm.OK and not on:
            tenant.obstacles.suspended()
            tenant.evidence.behind |= self.lanes.reader_of(tenant).unread(tenant)
        if status != rm.OK:
            self.trust.refused(tenant, on, status, self.clock())
            self._show(tenant, 0.0)  # its new work is held back instead
        self._show(tenant, took_s)

    def ask_again_s(self, card: str) -> float:
        """When a container of this card gives cause to decide anew, if nothing happens before."""
        return self._decision.again_s.get(card, inf)

    def beat(self, card: str, late: bool) -> bool:
        """The thread of a card lives: say so to those that depend on it, but never that we live where another thread of theirs
        hangs. Where it is late nobody knows who went on by himself: all are started, and stopped anew. Does any of them look?"""
        looks = False
        for tenant in self.tenants.depending(card):
            if tenant.page is not None:
                tenant.page.beat(self.lanes.alive_ms(tenant))
                looks |= tenant.page.waits
            if late:
                self._doubt(tenant)
            if self.trust.tries(tenant, self.clock()):
                self._show(tenant, 0.0)
                self.lanes.wake(tenant)
            if tenant.obstacles.falls_mute(self.clock(), len(tenant.grant.cards)):
                self._obstructed(tenant)
            if self.trust.forgets(tenant, self.clock()):
                self._know(tenant)
        return looks

    def fail(self) -> None:
        """A thread of ours failed: start everybody, and let a fresh arbiter take over."""
        try:
            with self.lock:
                self.ending = self._undecided = True
                self.orders.forget()
            self._release_all()
        finally:
            self._failed()

    def _apply(self, event: Event) -> None:
        tenant = self.tenants.get(event.name)
        self.orders.forget(tenant.cards if tenant is not None else None)
        self.trace.append(event)
        self.share.apply(event)
        self._undecided = True

    def _know(self, tenant: TenantTurns, at_s: float | None = None) -> None:
        """Bring what the policy knows of a tenant in step with what it is. One without channels stays: its debts do."""
        terms, at_s = tenant.terms(), self.clock() if at_s is None else at_s
        if tenant.page is None:  # a tenant of the same name may be here by now
            return
        if terms is not None and terms != tenant.joined:
            tenant.shown_on = True if tenant.joined is None else tenant.shown_on
            tenant.joined = terms
            self.tenants.moved()
            self._apply(Join(at_s, tenant.name, terms))
            for uuid in terms.cards:
                self.lanes.of(uuid)
        if tenant.joined is not None:
            for event in tenant.news(at_s):
                self._apply(event)

    def _weigh(self, tenant: TenantTurns, number: int, said: wire.Activity, at_s: float) -> None:
        silent_s = 0.0
        if said.what is wire.What.RESUMED:
            self.orders.forget()
            self.lanes.wake(tenant)
            silent_s = self.lanes.silent_s(tenant, at_s)
        self.trust.hear(tenant, number, said, at_s, silent_s)

    def _doubt(self, tenant: TenantTurns) -> None:
        tenant.doubt(self.clock())
        self.orders.forget()
        self.lanes.wake(tenant)

    def _obstructed(self, tenant: TenantTurns) -> None:
        """Something stands in the way of suspending it, or does not any more."""
        self.orders.forget()
        self._know(tenant)
        self._show(tenant, 0.0)
        self.lanes.wake(tenant)

    def _show(self, tenant: TenantTurns, took_s: float) -> None:
        """Tell its processes and the policy how it stands now, once it stands so on all of its cards. One without channels is what it is
        to be: while it is to be off, who comes next waits at the gate until the arbiter has met and suspended it."""
        if tenant.joined is None or tenant.page is None:
            return
        gated = (tenant.gates or tenant.empty) and not tenant.wanted
        runs, stopped = (all(map(stands, tenant.joined.cards)) for stands in (tenant.is_on, tenant.is_off))
        drained, off = gated and (tenant.drained or tenant.empty), stopped and not runs
        if drained or off:
            on = False
        elif runs or tenant.obstacles.trouble or tenant.obstacles.denied:
            on = True
        else:
            return
        waited = tenant.page.waits
        tenant.page.show_turn(off=off, gate=gated, alive_ms=self.lanes.alive_ms(tenant))
        if tenant.page.waits and not waited:
            self.lanes.beat_soon(tenant)
        for event in tenant.caught(max(self.clock(), self.share.now_s), stopped=off):
            self._apply(event)
        if on is not tenant.shown_on:
            at_s = self.clock()
            tenant.stands(at_s, on=on)
            self._apply(Switched(at_s, tenant.name, on, took_s, gate=drained))

    def _decide(self, at_s: float | None = None) -> None:
        self._decision = self.share.decide(self.clock() if at_s is None else at_s)
        self._undecided = False
        for name, tenant in self.tenants.items():
            wanted = self.ending or tenant.joined is None or name in self._decision.on
            if wanted != tenant.wanted:
                tenant.wanted = wanted
                self.orders.forget(tenant.cards)
                if tenant.gates or all(map(tenant.is_on, tenant.cards)):
                    self._show(tenant, 0.0)
                self.lanes.wake(tenant)
        for lane in self.lanes.all():
            lane.ask_again(self.ask_again_s(lane.uuid))  # one that is in the driver keeps no other from its time

    def _release_all(self) -> list[Seat]:
        with self.lock:
            seats = [(tenant.obstacles.denied, seat) for tenant, seat in self.tenants.seats()]
        for denied, seat in seats:
            if not denied or seat.runs is Runs.OFF:
                seat.resume()
        return [seat for _, seat in seats]

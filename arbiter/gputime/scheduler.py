"""Schedules the GPU time of a node: passes usage reports to the policy, and its decisions to the GPUs' threads.

`vgpu.gputime.scheduler` decides; `arbiter.gputime.gpu_thread` reads the messages and makes the switches. Only bookkeeping is done under the lock,
never a switch. A thread that has the server's lock may take this one, never the other way round.

It fails open. A container that cannot be suspended runs on, and the page's gate has it delay its launches. When a thread fails, every container
is resumed and the arbiter ends, so that a fresh one takes over.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Set
from math import inf
from typing import Final

from arbiter.connection import TOO_MANY, Connection
from arbiter.gputime.channels import ChannelGroup, Runs
from arbiter.gputime.container import GpuTimeContainer
from arbiter.gputime.containers import GpuTimeContainers
from arbiter.gputime.counts import Counts
from arbiter.gputime.gpu_thread import GpuThread
from arbiter.gputime.gpu_threads import GpuThreads
from arbiter.gputime.log_messages import report_of_partial, report_of_stall
from arbiter.gputime.preemption_plan import Orders
from arbiter.gputime.process import PROCESSES_LIMIT, Process
from arbiter.gputime.timer import now_s
from arbiter.gputime.trust import Trust
from arbiter.gputime.watchdog import Watchdog
from arbiter.identity import Identity
from arbiter.page import Page
from arbiter.stalls import Pulse, Stalls
from vgpu.api.errors import BadDocument
from vgpu.api.grant import Grant
from vgpu.gputime import resource_manager as rm
from vgpu.gputime.decision import Decision
from vgpu.gputime.events import Event, Join, Leave, Stalled, Switched
from vgpu.gputime.scheduler import GpuTimeScheduler
from vgpu.gputime.timing import Settings
from vgpu.gputime.trial import Suspending
from vgpu.protocol import wire
from vgpu.protocol.status import GpuTimeStatus

EVENTS_KEPT: Final = 4096
"""Events kept in the trace, for an administrator who reads it. Guessed: some seconds of a busy node."""


class NodeScheduler:
    """All containers with channels on this node. `failed` is called, from a thread of ours, when one of them fails."""

    def __init__(
        self,
        failed: Callable[[], None],
        settings: Settings | None = None,
        *,
        awake_s: float = 0.1,
        watchdog_s: float = 0.1,
        suspending: Callable[[Iterable[str]], Suspending] = lambda _: Suspending(),
        copies: bool = False,
        cap_unreported: bool = False,
        processes: int = PROCESSES_LIMIT,
        clock: Callable[[], float] = now_s,
    ) -> None:
        self.clock = clock
        self.pulse, self.stalls = Pulse(clock), Stalls()
        self.lock = threading.Lock()
        self.policy = GpuTimeScheduler(settings)
        self.trace: deque[Event] = deque(maxlen=EVENTS_KEPT)
        self.containers = GpuTimeContainers()
        self.counts = Counts()
        self.ending = False
        """No container is suspended any more, and all are resumed."""
        self._failed, self._awake_s, self._copies = failed, awake_s, copies
        self._cap_unreported, self._processes = cap_unreported, processes
        self.gpu_threads = GpuThreads(lambda uuid: GpuThread(uuid, self), self.pulse, clock)
        self.trust = Trust(self.counts, suspending)
        self.watchdog = Watchdog(self.containers.depending, self.counts, watchdog_s)
        self._decision = Decision(frozenset(), {}, {})
        self._undecided = True
        """Has something happened since?"""
        self.orders = Orders(self.policy.lead_s)

    def adopt(self, name: str, grant: Grant, page: Page, connection: Connection) -> None:
        """A connection for GPU time; the caller gives it up."""
        with self.lock:
            container = self.containers.get(name)
            if container is None:
                container = GpuTimeContainer(
                    name,
                    grant,
                    page,
                    self.clock(),
                    copies=self._copies,
                    caps_unreported=self._cap_unreported,
                    clock=self.clock,
                )
                self.containers.add(container)
                self.trust.judge(container, self.clock())
            most = min(self._processes, PROCESSES_LIMIT)
            if self.ending or len(container.processes) >= most:
                connection.refuse(TOO_MANY, f"more than {most} processes of one container")
                connection.sock.close()
                return
            container.processes[connection.number] = Process(connection.pid, connection.pid_in_container)
            self.gpu_threads.reader_of(container).take(container, connection)

    def change(self, name: str, grant: Grant) -> None:
        """The same container, with other terms."""
        with self.lock:
            container = self.containers.get(name)
            if container is not None:
                container.grant = grant
                self.containers.moved()
                self.orders.forget()
                self._know(container)
                self._decide()

    def never_suspend(self, name: str, pids: Mapping[int, str]) -> None:
        """These processes of a container, by host pid, and no others, for these reasons: `arbiter.memory.exempt_processes`."""
        with self.lock:
            container = self.containers.spare(name, pids)
            if container is not None:
                self._obstructed(container)

    def contexts(self, name: str, begun_s: Mapping[tuple[Identity, int], float]) -> None:
        """Since when each process of a container has had a context on each GPU of its grant, by `now_s`."""
        with self.lock:
            self.containers.contexts(name, begun_s)

    def drop(self, name: str) -> None:
        """The grant is gone, or another container's: hang up on its processes. Its page may be closed after this."""
        with self.lock:
            container = self.containers.remove(name)
            if container is None:
                return
            if container.page is not None:
                container.page.show_state(off=False)
            container.page, container.wanted = None, True
            if container.joined is not None:
                self._apply(Leave(self.clock(), name))
            if container.processes:
                self.gpu_threads.reader_of(container).hang_up(container)

    def statuses(self) -> dict[str, GpuTimeStatus]:
        """What every container got, by name."""
        with self.lock:
            self._decide()  # what is shown is of now
            return {
                name: container.status(self.policy.usage(name), self.policy.credit_s(name), self.clock())
                for name, container in self.containers.items()
                if container.joined is not None
            }

    def to_report(self) -> set[str]:
        """Containers with unreported work in `statuses`, or stopped by another process."""
        with self.lock:
            return self.containers.to_report(self.clock())

    def recorded(self) -> list[Event]:
        """The last events, oldest first. When none was forgotten yet, a replay decides as this node did."""
        with self.lock:
            return list(self.trace)

    def watched(self) -> dict[str, tuple[frozenset[str], frozenset[int]]]:
        """GPUs and host pids of every container whose usage reports are to be compared with the driver's count."""
        with self.lock:
            return {
                name: (container.joined.gpus, frozenset(process.pid for process in container.processes.values()))
                for name, container in self.containers.items()
                if container.joined is not None
            }

    def usage_check(self, seen_s: Mapping[str, float], whole: Set[str], at_s: float) -> None:
        """It is `at_s`, and since the last look the driver saw these compute for so many seconds; of `whole` it saw all there was."""
        with self.lock:
            if self.ending:
                return
            self.trust.checked(at_s)
            for name, seconds in seen_s.items():
                container = self.containers.get(name)
                if container is None or container.joined is None or container.page is None:
                    continue
                self.trust.weigh(container, at_s, seconds, whole=name in whole)
                self._know(container)
            self._decide()

    def checks(self, at_s: float) -> bool:
        """Are usage reports compared with what the driver counts?"""
        return self.trust.checks(at_s)

    def close(self) -> None:
        """Resume every container and end the threads."""
        with self.lock:
            self.ending = self._undecided = True
            self.orders.forget()
            gpu_threads = self.gpu_threads.all()
        for gpu_thread in gpu_threads:
            gpu_thread.stop()
        self.pulse.close()
        for channel_group in self._release_all():
            channel_group.close()

    # Under the lock, from the GPUs' threads.

    def hear(
        self, container: GpuTimeContainer, connection: Connection, message: wire.Message, fd: int | None, at_s: float
    ) -> None:
        """A message of a process came at `at_s`, with a descriptor that is ours then. Raises BadDocument."""
        at_s = max(at_s, self.policy.now_s)  # what others did meanwhile is in the records and stays before it
        self.watchdog.heard(container, message, at_s)
        still = isinstance(message, wire.Activity) and message.what is wire.What.STILL
        if self._awake_s and container.urgent and not still:
            self.gpu_threads.stay_awake(container, at_s + self._awake_s)
        match message:
            case wire.Activity():
                self._weigh(container, connection.number, message, at_s)
                if container.page is not None:
                    for event in container.says(connection.number, message, at_s):
                        self._apply(event)
                    if container.gates:
                        self._show(container, 0.0)
            case wire.Channels():
                container.sits(connection.number, message, fd, at_s)
                container.obstacles.changed_channels()
                self.trust.judge(container, self.clock())
                self.orders.forget()
                report_of_partial(container)
            case _:
                raise BadDocument(f"{type(message).__name__.upper()} has no place on a connection for GPU time")
        self._know(container, at_s)
        if isinstance(message, wire.Channels) and container.wanted:
            self._show(container, 0.0)  # one that is to be off is suspended first, and its gate stays shut until then

    def lose(self, container: GpuTimeContainer, connection: Connection) -> list[ChannelGroup]:
        """A process hung up, or is hung up on: its channel groups, which are the caller's now."""
        channel_groups = container.leaves(connection.number, self.clock())
        container.obstacles.changed_channels()  # what was known may have been of that process's
        self.orders.forget()
        self._know(container)
        self._show(container, 0.0)  # it may have been the one that still ran, or that did not run yet, or the last
        return channel_groups

    def stopped(self, container: GpuTimeContainer, at_s: float, status: int, took_s: float) -> None:
        """By an order, for what was said at `at_s` and has been heard since: the policy has it decided then, and it is done now."""
        self._decide(at_s)
        self.switched(container, False, status, took_s)

    def stalled(self, gpu: str, since_s: float, at_s: float) -> None:
        """The arbiter did not run, for a GPU."""
        self.stalls.note(gpu, since_s, at_s)
        self._apply(Stalled(max(at_s, self.policy.now_s), gpu, since_s))
        report_of_stall(gpu, at_s - since_s)

    def give_orders(self, gpu: str) -> None:
        """Nothing is to be switched on a GPU now: precompute what will be when a request comes."""
        if not self.ending:
            self.orders.give(gpu, self.containers.depending(gpu), self.containers, self.policy)

    def hush(self, container: GpuTimeContainer, *, unheard: bool) -> None:
        """A container is not read for a while, or is again."""
        container.hears(self.clock(), unheard=unheard)
        self._know(container)

    def step(self, gpu: str) -> tuple[GpuTimeContainer, bool] | None:
        """What to switch next on a GPU: suspends first, so that no container is resumed beside one that is to run alone."""
        if self._undecided or self.clock() >= self._decision.decide_again_s:
            self._decide()
        starts = None
        for container in self.containers.depending(gpu):
            if gpu not in container.gpus:
                continue  # it is only read here
            todo = container.to_do(gpu)
            if todo is False:
                return container, False
            if todo is True and (starts is None or not container.wanted):
                starts = container
        return None if starts is None else (starts, True)

    def switched(self, container: GpuTimeContainer, on: bool, status: int, took_s: float) -> None:
        """A switch was made, or failed: then the container runs, and does so until it reports its channels again."""
        self.counts.switches += 1
        if status == rm.OK and not on:
            container.obstacles.suspended()
            container.evidence.behind |= self.gpu_threads.reader_of(container).unread(container)
        if status != rm.OK:
            self.trust.refused(container, on, status, self.clock())
            self._show(container, 0.0)  # its launches are delayed instead
        self._show(container, took_s)

    def decide_again_s(self, gpu: str) -> float:
        """When a container of this GPU gives cause to decide anew, if nothing happens before."""
        return self._decision.again_s.get(gpu, inf)

    def beat(self, gpu: str, late: bool) -> bool:
        """The thread of a GPU lives: show it to the containers that depend on it, unless another thread of theirs hangs. If it is late, containers
        may have resumed themselves: all are resumed, and suspended again. Does any of them look?"""
        looks = False
        for container in self.containers.depending(gpu):
            if container.page is not None:
                container.page.beat(self.gpu_threads.alive_ms(container))
                looks |= container.page.waits
            if late:
                self._doubt(container)
            if self.trust.tries(container, self.clock()):
                self._show(container, 0.0)
                self.gpu_threads.wake(container)
            if container.obstacles.falls_mute(self.clock(), len(container.grant.gpus)):
                self._obstructed(container)
            if self.trust.forgets(container, self.clock()):
                self._know(container)
        return looks

    def fail(self) -> None:
        """A thread of a GPU failed: resume every container, and let a fresh arbiter take over."""
        try:
            with self.lock:
                self.ending = self._undecided = True
                self.orders.forget()
            self._release_all()
        finally:
            self._failed()

    def _apply(self, event: Event) -> None:
        container = self.containers.get(event.name)
        self.orders.forget(container.gpus if container is not None else None)
        self.trace.append(event)
        self.policy.apply(event)
        self._undecided = True

    def _know(self, container: GpuTimeContainer, at_s: float | None = None) -> None:
        """Bring what the policy knows of a container in step with what it is. One without channels stays: its debts do."""
        terms, at_s = container.terms(), self.clock() if at_s is None else at_s
        if container.page is None:  # a container of the same name may be here by now
            return
        if terms is not None and terms != container.joined:
            container.shown_on = True if container.joined is None else container.shown_on
            container.joined = terms
            self.containers.moved()
            self._apply(Join(at_s, container.name, terms))
            for uuid in terms.gpus:
                self.gpu_threads.of(uuid)
        if container.joined is not None:
            for event in container.news(at_s):
                self._apply(event)

    def _weigh(self, container: GpuTimeContainer, number: int, said: wire.Activity, at_s: float) -> None:
        silent_s = 0.0
        if said.what is wire.What.RESUMED:
            self.orders.forget()
            self.gpu_threads.wake(container)
            silent_s = self.gpu_threads.silent_s(container, at_s)
        self.trust.hear(container, number, said, at_s, silent_s)

    def _doubt(self, container: GpuTimeContainer) -> None:
        container.doubt(self.clock())
        self.orders.forget()
        self.gpu_threads.wake(container)

    def _obstructed(self, container: GpuTimeContainer) -> None:
        """Something stands in the way of suspending it, or does not any more."""
        self.orders.forget()
        self._know(container)
        self._show(container, 0.0)
        self.gpu_threads.wake(container)

    def _show(self, container: GpuTimeContainer, took_s: float) -> None:
        """Tell its processes and the policy how it stands now, once it stands so on all of its GPUs. One without channels is what it is
        to be: while it is to be off, who comes next waits at the gate until the arbiter has met and suspended it."""
        if container.joined is None or container.page is None:
            return
        gated = (container.gates or container.empty) and not container.wanted
        runs, stopped = (all(map(stands, container.joined.gpus)) for stands in (container.is_on, container.is_off))
        drained, off = gated and (container.drained or container.empty), stopped and not runs
        if drained or off:
            on = False
        elif runs or container.obstacles.trouble or container.obstacles.denied:
            on = True
        else:
            return
        waited = container.page.waits
        container.page.show_state(off=off, gate=gated, alive_ms=self.gpu_threads.alive_ms(container))
        if container.page.waits and not waited:
            self.gpu_threads.beat_soon(container)
        for event in container.caught(max(self.clock(), self.policy.now_s), stopped=off):
            self._apply(event)
        if on is not container.shown_on:
            at_s = self.clock()
            container.stands(at_s, on=on)
            self._apply(Switched(at_s, container.name, on, took_s, gate=drained))

    def _decide(self, at_s: float | None = None) -> None:
        self._decision = self.policy.decide(self.clock() if at_s is None else at_s)
        self._undecided = False
        for name, container in self.containers.items():
            wanted = self.ending or container.joined is None or name in self._decision.on
            if wanted != container.wanted:
                container.wanted = wanted
                self.orders.forget(container.gpus)
                if container.gates or all(map(container.is_on, container.gpus)):
                    self._show(container, 0.0)
                self.gpu_threads.wake(container)
        for gpu_thread in self.gpu_threads.all():
            gpu_thread.wake_at(
                self.decide_again_s(gpu_thread.uuid)
            )  # one that is in the driver keeps no other from its time

    def _release_all(self) -> list[ChannelGroup]:
        with self.lock:
            channel_groups = [
                (container.obstacles.denied, channel_group)
                for container, channel_group in self.containers.channel_groups()
            ]
        for denied, channel_group in channel_groups:
            if not denied or channel_group.runs is Runs.OFF:
                channel_group.resume()
        return [channel_group for _, channel_group in channel_groups]

"""Schedules the GPU time of a node: passes usage reports to the GPU-time scheduler, and its decisions to the GPUs' threads.

`vgpu.gputime.scheduler` decides; `arbiter.gputime.suspend_thread` reads the messages and makes the switches. The lock covers bookkeeping only,
never a switch. A thread that holds the server's lock may acquire this one, never the other way round.

It fails open. A container that cannot be suspended continues to run, and the page's gate delays its launches. If a thread fails, every container
is resumed and the arbiter ends, so that a new one replaces it.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Set
from functools import partial
from math import inf
from typing import Final

from arbiter.connection import TOO_MANY, Connection
from arbiter.gputime.blocks import Blocks
from arbiter.gputime.channels import ChannelGroup, ChannelState
from arbiter.gputime.container import GpuTimeContainer
from arbiter.gputime.container_status import status_of
from arbiter.gputime.containers import GpuTimeContainers
from arbiter.gputime.counters import GpuTimeCounters
from arbiter.gputime.due_switches import DueSwitches
from arbiter.gputime.log_messages import report_of_partial, report_of_stall
from arbiter.gputime.process import PROCESSES_LIMIT, GpuTimeProcess
from arbiter.gputime.suspend_plan import SuspendPlan
from arbiter.gputime.suspend_thread import SuspendThread
from arbiter.gputime.suspend_threads import SuspendThreads
from arbiter.gputime.timer import now_s
from arbiter.gputime.verdicts import ContainerVerdicts
from arbiter.gputime.watchdog import Watchdog
from arbiter.identity import Identity
from arbiter.page import ContainerPage
from arbiter.stalls import Pulse, Stalls
from vgpu.api.burst import BurstLimits
from vgpu.api.errors import BadDocument
from vgpu.api.grant import Grant
from vgpu.gputime import resource_manager as rm
from vgpu.gputime.decision import Decision
from vgpu.gputime.events import Block, Event, Join, Leave, Stalled, Switched
from vgpu.gputime.scheduler import GpuTimeScheduler
from vgpu.gputime.timing import Timing
from vgpu.gputime.trial_verdict import Suspendability
from vgpu.protocol import wire
from vgpu.protocol.status import GpuTimeStatus

EVENTS_KEPT: Final = 4096
"""Events kept in the trace, for an operator to read. Guessed: some seconds of a busy node."""


class NodeScheduler:
    """All containers with channels on this node. `failed` is called from a GPU's thread if it fails; `observe` under the lock with each event."""

    def __init__(
        self,
        failed: Callable[[], None],
        settings: Timing | None = None,
        *,
        awake_s: float = 0.1,
        watchdog_s: float = 0.1,
        suspending: Callable[[Iterable[str]], Suspendability] = lambda _: Suspendability(),
        copies: bool = False,
        cap_unreported: bool = False,
        processes: int = PROCESSES_LIMIT,
        clock: Callable[[], float] = now_s,
        observe: Callable[[Event], None] = lambda _: None,
    ) -> None:
        self.clock = clock
        self.pulse, self.stalls = Pulse(clock), Stalls()
        self.lock = threading.Lock()
        self.policy = GpuTimeScheduler(settings)
        self.trace: deque[Event] = deque(maxlen=EVENTS_KEPT)
        self.containers = GpuTimeContainers()
        self.counters = GpuTimeCounters()
        self.ending = False
        """No further container is suspended, and all are resumed."""
        self._failed, self._awake_s, self._processes, self._observe = failed, awake_s, processes, observe
        self._new = partial(GpuTimeContainer, copies=copies, caps_unreported=cap_unreported, clock=clock)
        self.suspend_threads = SuspendThreads(lambda uuid: SuspendThread(uuid, self), self.pulse, clock)
        self._due = DueSwitches(self.containers, self.suspend_threads)
        self.verdicts = ContainerVerdicts(self.counters, suspending)
        self.watchdog = Watchdog(self.containers.depending, self.counters, watchdog_s)
        self._decision = Decision(frozenset(), {}, {})
        self._undecided = True
        """Whether an event came after the last decision."""
        self.suspend_plan = SuspendPlan(self.policy.lead_s)
        self.blocks = Blocks(self.lock, self.containers, clock, self._apply, self._obstacle_changed)

    def adopt(
        self, name: str, grant: Grant, page: ContainerPage, connection: Connection, burst: BurstLimits | None = None
    ) -> None:
        """Take ownership of a connection for GPU time."""
        with self.lock:
            container = self.containers.get(name)
            if container is None:
                container = self._new(name, grant, page, self.clock(), burst=burst)
                self.containers.add(container)
                self.blocks.admit(container)
                self.verdicts.judge(container, self.clock())
            most = min(self._processes, PROCESSES_LIMIT)
            if self.ending or len(container.processes) >= most:
                connection.refuse(TOO_MANY, f"more than {most} processes of one container")
                connection.close()
                return
            container.processes[connection.number] = GpuTimeProcess(connection.pid, connection.pid_in_container)
            self.suspend_threads.reader_of(container).take(container, connection)

    def change(self, name: str, grant: Grant, burst: BurstLimits | None = None) -> None:
        """The same container, with other limits."""
        with self.lock:
            if (container := self.containers.get(name)) is not None:
                container.grant, container.burst = grant, burst
                self.containers.moved()
                self.suspend_plan.discard()
                self._sync_policy(container)
                self._decide()

    def never_suspend(self, name: str, pids: Mapping[int, str]) -> None:
        """These processes of a container, by host pid, and no others, for these reasons: `arbiter.memory.exempt_processes`."""
        with self.lock:
            if (container := self.containers.set_exempt(name, pids)) is not None:
                self._obstacle_changed(container)

    def contexts(self, name: str, begun_s: Mapping[tuple[Identity, int], float]) -> None:
        """Set since when each process of a container has had a context on each GPU of its grant, by `now_s`."""
        with self.lock:
            self.containers.contexts(name, begun_s)

    def drop(self, name: str) -> None:
        """The grant is gone, or names another container now: close its processes' connections. Its page may be closed after this."""
        with self.lock:
            self.blocks.forget(name)
            container = self.containers.remove(name)
            if container is None:
                return
            if container.page is not None:
                container.page.show_state(off=False)
            container.page, container.wanted = None, True
            if container.joined is not None:
                self._apply(Leave(self.clock(), name))
            if container.processes:
                self.suspend_threads.reader_of(container).hang_up(container)

    def statuses(self) -> dict[str, GpuTimeStatus]:
        """The GPU time of every container, by name."""
        with self.lock:
            self._decide()  # so that the status is current
            return {
                name: status_of(container, self.policy.usage(name), self.policy.credit_s(name), self.clock())
                for name, container in self.containers.items()
                if container.joined is not None
            }

    def to_report(self) -> set[str]:
        """Containers with unreported work in `statuses`, or stopped by another process."""
        with self.lock:
            return self.containers.to_report(self.clock())

    def watched(self) -> dict[str, tuple[frozenset[str], frozenset[int]]]:
        """GPUs and host pids of every container whose usage reports are to be compared with the driver's count."""
        with self.lock:
            return self.containers.watched()

    def usage_check(self, seen_s: Mapping[str, float], whole: Set[str], at_s: float) -> None:
        """Evaluate a reading at `at_s`. `seen_s`: seconds that the driver counted since the last reading, by container; complete for `whole`."""
        with self.lock:
            if self.ending:
                return
            self.verdicts.checked(at_s)
            for name, seconds in seen_s.items():
                container = self.containers.get(name)
                if container is None or container.joined is None or container.page is None:
                    continue
                self.verdicts.weigh(container, at_s, seconds, whole=name in whole)
                self._sync_policy(container)
            self._decide()

    def close(self) -> None:
        """Resume every container and end the threads."""
        with self.lock:
            self.ending = self._undecided = True
            self.suspend_plan.discard()
            suspend_threads = self.suspend_threads.all()
        for suspend_thread in suspend_threads:
            suspend_thread.stop()
        self.pulse.close()
        for channel_group in self._release_all():
            channel_group.close()

    # Under the lock, from the GPUs' threads.
    def handle(
        self, container: GpuTimeContainer, connection: Connection, message: wire.Message, fd: int | None, at_s: float
    ) -> None:
        """Handle a message of a process that came at `at_s`, and own its descriptor. Raises BadDocument."""
        at_s = max(at_s, self.policy.now_s)  # later events of others are recorded already and stay before it
        self.watchdog.note_report(container, message, at_s)
        still = isinstance(message, wire.Activity) and message.what is wire.ActivityKind.STILL
        if self._awake_s and container.urgent and not still:
            self.suspend_threads.stay_awake(container, at_s + self._awake_s)
        match message:
            case wire.Activity():
                self._check_report(container, connection.number, message, at_s)
                if container.page is not None:
                    for event in container.take_activity(connection.number, message, at_s):
                        self._apply(event)
                    if container.gates:
                        self._publish_state(container, 0.0)
            case wire.Channels():
                if message.away:
                    self.blocks.away(container, connection.number)
                container.set_channels(connection.number, message, fd, at_s)
                container.obstacles.changed_channels()
                self.verdicts.judge(container, self.clock())
                self.suspend_plan.discard()
                report_of_partial(container)
            case _:
                raise BadDocument(f"{type(message).__name__.upper()} is invalid on a connection for GPU time")
        self._sync_policy(container, at_s)
        if isinstance(message, wire.Channels) and container.wanted:
            self._publish_state(container, 0.0)  # if it may not run, its gate stays shut until it is suspended

    def lose(self, container: GpuTimeContainer, connection: Connection) -> list[ChannelGroup]:
        """A process's connection ended. Returns its channel groups, which the caller now owns."""
        channel_groups = container.remove_process(connection.number, self.clock())
        container.obstacles.changed_channels()  # the known obstacles may have been of that process's channels
        self.suspend_plan.discard()
        self._sync_policy(container)
        self._publish_state(container, 0.0)  # that process may have been the only one not switched yet, or the last one
        return channel_groups

    def suspended(self, container: GpuTimeContainer, at_s: float, status: int, took_s: float) -> None:
        """A planned suspend is complete, for a message of `at_s` that has been handled since: the policy decides as of that time."""
        self._decide(at_s)
        self.switched(container, False, status, took_s)

    def stalled(self, gpu: str, since_s: float, at_s: float) -> None:
        """The arbiter did not run, for a GPU."""
        self.stalls.note(gpu, since_s, at_s)
        self._apply(Stalled(max(at_s, self.policy.now_s), gpu, since_s))
        report_of_stall(gpu, at_s - since_s)

    def plan_suspends(self, gpu: str) -> None:
        """There is nothing to switch on a GPU now: precompute the suspends for the next request."""
        if not self.ending:
            self.suspend_plan.compute(gpu, self.containers.depending(gpu), self.containers, self.policy)

    def set_throttled(self, container: GpuTimeContainer, *, throttled: bool) -> None:
        """A container is not read for a while, or is again."""
        container.set_throttled(self.clock(), throttled=throttled)
        self._sync_policy(container)

    def step(self, gpu: str) -> tuple[GpuTimeContainer, bool] | None:
        """What to switch next on a GPU."""
        for event in self._due.hung(gpu, max(self.clock(), self.policy.now_s)):
            self._apply(event)
        if self._undecided or self.clock() >= self._decision.decide_again_s:
            self._decide()
        return self._due.next(gpu)

    def switched(self, container: GpuTimeContainer, on: bool, status: int, took_s: float) -> None:
        """A switch was made, or failed: then the container runs until it reports its channels again."""
        self.counters.switches += 1
        if status == rm.OK and not on:
            container.obstacles.suspended()
            container.evidence.unread_connections |= self.suspend_threads.reader_of(container).unread(container)
        if status != rm.OK:
            self.verdicts.refused(container, on, status, self.clock())
            self._publish_state(container, 0.0)  # its launches are delayed instead
        self._publish_state(container, took_s)

    def decide_again_s(self, gpu: str) -> float:
        """When a container of this GPU needs the next decision, if no event comes before."""
        return self._decision.again_s.get(gpu, inf)

    def beat(self, gpu: str, late: bool) -> bool:
        """The thread of a GPU is alive: publish the heartbeat to the containers that depend on it, unless another thread of theirs hangs. If it is late,
        containers may have resumed themselves: all are resumed, and suspended again. Returns whether any of them reads the heartbeat."""
        looks = False
        for container in self.containers.depending(gpu):
            if container.page is not None:
                container.page.beat(self.suspend_threads.alive_ms(container))
                looks |= container.page.waits
            if late:
                self._mark_unsure(container)
            if self.verdicts.tries(container, self.clock()):
                self._publish_state(container, 0.0)
                self.suspend_threads.wake(container)
            if container.obstacles.check_channels(self.clock(), len(container.grant.gpus)):
                self._obstacle_changed(container)
            if self.verdicts.forgets(container, self.clock()):
                self._sync_policy(container)
        return looks

    def fail(self) -> None:
        """A thread of a GPU failed: resume every container, and end the arbiter so that a new one replaces it."""
        try:
            with self.lock:
                self.ending = self._undecided = True
                self.suspend_plan.discard()
            self._release_all()
        finally:
            self._failed()

    def _apply(self, event: Event) -> None:
        container = self.containers.get(event.name)
        self.suspend_plan.discard(container.gpus if container is not None else None)
        self.trace.append(event)
        self.policy.apply(event)
        self._observe(event)
        self._undecided = True

    def _sync_policy(self, container: GpuTimeContainer, at_s: float | None = None) -> None:
        """Update a container's parameters in the policy. A container without channels stays, and so do its debts."""
        parameters, at_s = container.parameters(), self.clock() if at_s is None else at_s
        if container.page is None:  # a new container may have the same name by now
            return
        if parameters is not None and parameters != container.joined:
            container.shown_on = True if container.joined is None else container.shown_on
            container.joined = parameters
            self.containers.moved()
            self._apply(Join(at_s, container.name, parameters))
            if container.blocked:
                self._apply(Block(at_s, container.name))
            for uuid in parameters.gpus:
                self.suspend_threads.of(uuid)
        if container.joined is not None:
            for event in container.work_events(at_s):
                self._apply(event)

    def _check_report(self, container: GpuTimeContainer, number: int, activity: wire.Activity, at_s: float) -> None:
        silent_s = 0.0
        if activity.what is wire.ActivityKind.RESUMED:
            self.suspend_plan.discard()
            self.suspend_threads.wake(container)
            silent_s = self.suspend_threads.silent_s(container, at_s)
        self.verdicts.take_activity(container, number, activity, at_s, silent_s)

    def _mark_unsure(self, container: GpuTimeContainer) -> None:
        container.doubt(self.clock())
        self.suspend_plan.discard()
        self.suspend_threads.wake(container)

    def _obstacle_changed(self, container: GpuTimeContainer) -> None:
        """An obstacle to suspending it, or a block, appeared or ended."""
        self.suspend_plan.discard()
        self._sync_policy(container)
        self._publish_state(container, 0.0)
        self.suspend_threads.wake(container)

    def _publish_state(self, container: GpuTimeContainer, took_s: float) -> None:
        """Publish to its processes and the policy whether it is on, once that is true on all of its GPUs. A container without channels counts as switched
        at once: while it may not run, a new process waits at the gate until the arbiter has its channels and has suspended it."""
        self._due.wake_waiting(container.gpus)
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
        container.page.show_state(off=off, gate=gated, alive_ms=self.suspend_threads.alive_ms(container))
        if container.page.waits and not waited:
            self.suspend_threads.beat_soon(container)
        for event in container.settle_stray(max(self.clock(), self.policy.now_s), stopped=off):
            self._apply(event)
        if on is not container.shown_on:
            at_s = self.clock()
            container.record_switch(at_s, on=on)
            self._apply(Switched(at_s, container.name, on, took_s, gate=drained))

    def _decide(self, at_s: float | None = None) -> None:
        self._decision = self.policy.decide(self.clock() if at_s is None else at_s)
        self._undecided = False
        for name, container in self.containers.items():
            wanted = self.ending or container.joined is None or name in self._decision.on
            if wanted != container.wanted:
                container.wanted = wanted
                self.suspend_plan.discard(container.gpus)
                if container.gates or all(map(container.is_on, container.gpus)):
                    self._publish_state(container, 0.0)
                self.suspend_threads.wake(container)
        for suspend_thread in self.suspend_threads.all():  # a thread in a call of the driver delays no other thread
            suspend_thread.wake_at(self.decide_again_s(suspend_thread.uuid))

    def _release_all(self) -> list[ChannelGroup]:
        with self.lock:
            channel_groups = self.containers.channel_groups()
        for denied, channel_group in channel_groups:
            if not denied or channel_group.runs is ChannelState.OFF:
                channel_group.resume()
        return [channel_group for _, channel_group in channel_groups]

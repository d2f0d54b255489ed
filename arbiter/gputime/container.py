"""One container in the GPU-time scheduler: its processes, their channels, and their reports of work.

Decides what counts as the container's work, whether all of it runs or is suspended, and what to switch. Related modules: the value of its usage
reports (`arbiter.gputime.usage_report`), the evidence on its suspends (`arbiter.gputime.suspend_evidence`), channels that run while it is suspended
(`arbiter.gputime.stray_channels`), and the reasons not to suspend it (`arbiter.gputime.obstacles`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf
from typing import Final

from arbiter import descriptors
from arbiter.budget import MessageBudget
from arbiter.gputime.channels import ChannelGroup, ChannelState
from arbiter.gputime.obstacles import Obstacles
from arbiter.gputime.process import ALL_CHANNEL_GROUPS_LIMIT, CHANNEL_GROUPS_LIMIT, GpuTimeProcess, is_full
from arbiter.gputime.stray_channels import StrayChannels
from arbiter.gputime.suspend_evidence import SuspendEvidence
from arbiter.gputime.timer import now_s
from arbiter.gputime.usage_report import UsageReports
from arbiter.page import ContainerPage
from vgpu.api.burst import BurstLimits, core_limit_percent
from vgpu.api.errors import BadDocument
from vgpu.api.grant import Grant
from vgpu.api.names import CLASSES
from vgpu.gputime import resource_manager as rm
from vgpu.gputime.events import BeginSection, EndSection, Event, Hint, Idle, Late, SchedulingParameters, Work
from vgpu.gputime.watchdog import ContainerWatchdog
from vgpu.protocol import wire

BEST_EFFORT: Final = CLASSES[-1]
FREE_WEIGHT: Final = 100.0
"""Weight of a container without a requested percentage: that of a whole GPU."""


class GpuTimeContainer:
    """A container with channels on at least one GPU. `name`: its grant directory's."""

    def __init__(
        self,
        name: str,
        grant: Grant,
        page: ContainerPage | None,
        at_s: float,
        *,
        burst: BurstLimits | None = None,
        copies: bool = False,
        caps_unreported: bool = False,
        clock: Callable[[], float] = now_s,
    ) -> None:
        self.name = name
        self._clock = clock
        self._caps_unreported = caps_unreported
        """Whether a verdict on its usage reports has an effect."""
        self._copies = copies
        """Whether its copy channels are suspended with the others while it is best-effort."""
        self.grant, self.burst = grant, burst
        self.page = page
        """None after the grant is gone: its connections are being closed."""
        self.budget = MessageBudget(at_s)
        self.processes: dict[int, GpuTimeProcess] = {}
        self.replaced: list[ChannelGroup] = []
        """Replaced groups: to be closed outside the lock."""
        self.joined: SchedulingParameters | None = None
        """Its parameters in the policy; None = it has no channels, so the policy does not have it."""
        self.wanted = True
        """Whether the policy decided that it runs."""
        self.shown_on: bool | None = None
        """As the policy knows it."""
        self.shown_working: bool | None = None
        """The same."""
        self.blocked = False
        """Memory of it is away, or is about to be: it must not run."""
        self.throttled = False
        """It has used its budget and is not read: meanwhile it counts as working."""
        self.watchdog_resumes = 0
        self.watchdog = ContainerWatchdog(at_s)
        self.obstacles = Obstacles(self.processes)
        self.evidence = SuspendEvidence(self.processes)
        self.reports = UsageReports(at_s)
        self.stray = StrayChannels()

    @property
    def gpus(self) -> frozenset[str]:
        """The GPUs on which it has channels, as in the policy."""
        return self.joined.gpus if self.joined is not None else frozenset()

    def depends_on(self) -> frozenset[str]:
        """GPUs whose threads read its messages or switch it."""
        return self.gpus | {self.grant.gpus[0].uuid}

    def parameters(self) -> SchedulingParameters | None:
        """Its parameters for the policy; None if there is nothing to switch. Its weight above its guarantee is the guarantee's."""
        with_channels = {gpu for process in self.processes.values() for gpu, _ in process.channel_groups}
        gpus = {self.grant.gpus[gpu].uuid for gpu in with_channels | self.obstacles.gpus_without_channels}
        if not gpus:
            return None
        granted = [gpu for gpu in self.grant.gpus if gpu.uuid in gpus]
        percent = max(gpu.core_percent for gpu in granted)
        limit_percent = max(core_limit_percent(gpu, self.burst) for gpu in granted)
        yields = any(process.yields for process in self.processes.values())
        silent = self.distrusted and not self.has_reported_work()  # its unreported work has no priority
        service_class = BEST_EFFORT if yields or silent else self.grant.service_class
        pace = self.reports.pace if silent else 1.0
        return SchedulingParameters(
            frozenset(gpus), service_class, self.grant.level, limit_percent, percent or FREE_WEIGHT, pace,
            guaranteed_percent=percent if percent < limit_percent else 0,
        )  # fmt: skip

    def take_activity(self, number: int, activity: wire.Activity, at_s: float) -> list[Event]:
        """Handle a process's report for the whole container. `work_events` decides whether the container works now."""
        self._add_up(at_s)
        process = self.processes[number]
        match activity.what:
            case wire.ActivityKind.WORK | wire.ActivityKind.IDLE:
                process.working, process.drained = activity.what == wire.ActivityKind.WORK, False
                process.kernels_only = process.working and bool(activity.value & wire.KERNELS_ONLY)
                process.began_s = at_s if process.working else inf
                self.reports.note_report(self.processes.values())
                return self._moved(process, activity, at_s)
            case wire.ActivityKind.STILL:
                process.kernels_only = process.kernels_only and bool(activity.value & wire.KERNELS_ONLY)
                self.reports.note_report(self.processes.values())
                return []
            case wire.ActivityKind.DRAINED:
                process.drained = process.working
                return []
            case wire.ActivityKind.YIELD | wire.ActivityKind.END_YIELD:
                process.yields = activity.what == wire.ActivityKind.YIELD
                return []
            case wire.ActivityKind.HINT:
                return [Hint(at_s, self.name, min(activity.value, 10_000_000) / 1e6)] if self.urgent else []
            case wire.ActivityKind.BEGIN_SECTION:
                return [BeginSection(at_s, self.name)] if self.urgent else []
            case _:
                return [EndSection(at_s, self.name)] if self.urgent else []

    def remove_process(self, number: int, at_s: float) -> list[ChannelGroup]:
        """A process disconnected. Returns its channel groups, which the caller closes."""
        self._add_up(at_s)
        self.evidence.unread_connections.discard(number)
        return list(self.processes.pop(number).channel_groups.values())

    def set_throttled(self, at_s: float, *, throttled: bool) -> None:
        """It is not read for a while, or is again."""
        self._add_up(at_s)
        self.throttled = throttled
        self.evidence.unread_connections.update(self.processes)

    def record_switch(self, at_s: float, *, on: bool) -> None:
        """It was resumed or suspended on all of its GPUs."""
        self._add_up(at_s)
        if on:
            self.evidence.on(at_s, suspended=self.shown_on is False and not self.gates)
        else:
            self.evidence.off(at_s)
        self.shown_on = on
        self.watchdog.record_switch(at_s, on=on)

    def work_events(self, at_s: float) -> list[Event]:
        """The event that updates whether it has work, if the policy's state differs."""
        if self.working() is self.shown_working:
            return []
        self.shown_working = self.working()
        return [Work(at_s, self.name) if self.shown_working else Idle(at_s, self.name)]

    def weigh(self, at_s: float, seen_s: float) -> bool:
        """The driver counted `seen_s` for its processes since the last reading. Returns whether the verdict on its reports changed."""
        self._add_up(at_s)
        return self.reports.weigh(at_s, seen_s)

    def ends_work(self, at_s: float, seen_s: float | None) -> bool:
        """The same, or None = the driver may not have counted them. Returns whether its work ended with that."""
        self._add_up(at_s)
        return self.reports.ends(seen_s) and self.reports_work()

    def contradicts(self, number: int, activity: wire.Activity, at_s: float, *, silent: bool) -> bool:
        """Whether this report shows that suspends have no effect. `silent`: the page may not have shown the heartbeat. A container that resumed itself is
        suspended again in any case."""
        if activity.what is not wire.ActivityKind.RESUMED:
            excused = self.gates or self.stray.any
            return self.evidence.take_activity(number, activity.what, at_s, off=self.shown_on is False, excused=excused)
        verdict = self.evidence.resumed(number, at_s, about_to=bool(activity.value & wire.ABOUT_TO), silent=silent)
        self._unsure(at_s)
        return verdict

    def doubt(self, at_s: float) -> None:
        """It may have resumed itself, on all of its GPUs, because the page did not show the heartbeat."""
        self.evidence.silent(at_s)
        self._unsure(at_s)

    def settle_stray(self, at_s: float, *, stopped: bool) -> list[Event]:
        """All of it is suspended again, if `stopped`, or resumed: it pays for the channels that ran meanwhile."""
        if self.stray.any and stopped:
            self.evidence.off_again(at_s)
        return self._late(at_s, self.stray.caught(at_s))

    def tries(self, at_s: float) -> bool:
        """Returns whether a new attempt to suspend it begins, after a time in which it could not be suspended."""
        return self.obstacles.tries(at_s) | self.evidence.effect.tries(at_s)

    def set_channels(self, number: int, channels: wire.Channels, fd: int | None, at_s: float) -> None:
        """Replace the channels of a process. Takes ownership of the descriptor. Raises BadDocument, and then closes it."""
        channel_groups, key = self.processes[number].channel_groups, (channels.gpu, channels.client)
        try:
            if channels.gpu >= len(self.grant.gpus):
                raise BadDocument(f"packet names GPU {channels.gpu}: this container has {len(self.grant.gpus)}, from 0")
            if channels.compute and fd is None:
                raise BadDocument("packet CHANNELS comes without a descriptor")
            if (
                key not in channel_groups
                and channels.compute
                and is_full(self.processes[number], self.processes.values())
            ):
                raise BadDocument(
                    f"packet CHANNELS names one client too many: at most {CHANNEL_GROUPS_LIMIT} of a process and {ALL_CHANNEL_GROUPS_LIMIT} of a container"
                )
            taken, fd = fd, None
            new = ChannelGroup(channels, taken, self.name, held=self.blocked) if taken is not None else None
        finally:
            if fd is not None:
                descriptors.close(fd, self.name)
        old = channel_groups.pop(key, None)
        if old is not None:
            self.replaced.append(old)
            old.owes = new is not None and new.partial and old.runs is not ChannelState.ON
        if new is not None:
            if self.shown_on is False:
                self.stray.comes(at_s, works=self.processes[number].working)
            new.partial |= self.processes[number].pid in self.obstacles.exempt
            if old is not None:
                new.replace(old)
            channel_groups[key] = new

    def sweep(self) -> list[ChannelGroup]:
        """Replaced lists, which the caller closes without the lock. Their remaining channels are in the new list, which is resumed first;
        `owes` if that list is partial."""
        left, self.replaced = self.replaced, []
        return left

    @property
    def urgent(self) -> bool:
        """Whether it may announce its work."""
        return self.grant.service_class == CLASSES[0]

    def has_reported_work(self) -> bool:
        """Whether any of its processes reports work and no evidence contradicts it. A throttled container may have reported work."""
        return self.throttled or (not self.reports.ended_work.ended and self.reports_work())

    def reports_work(self) -> bool:
        """Whether any of its processes reports work. Work that the driver does not count may be suspended."""
        return any(process.working for process in self.processes.values())

    def working(self) -> bool:
        """Whether it counts as having work. Always true if its reports do not count."""
        return self.has_reported_work() or (self.distrusted and bool(self.processes))

    @property
    def distrusted(self) -> bool:
        """Whether its reports do not count, because the driver counted GPU time without a report."""
        return self._caps_unreported and self.reports.unreported_work.proven

    @property
    def gates(self) -> bool:
        """Whether its launches are delayed while it is not allowed to run."""
        return self.obstacles.any or self.evidence.effect.gates

    @property
    def empty(self) -> bool:
        """Whether no process has a channel, nor work or a context that implies channels."""
        known = any(process.channel_groups or process.working for process in list(self.processes.values()))
        return not known and not self.obstacles.gpus_without_channels

    @property
    def drained(self) -> bool:
        """Whether all its work waits at its gate, by its processes' reports and without contradicting evidence. Then it counts as suspended."""
        working = [process for process in self.processes.values() if process.working]
        return bool(working) and all(process.drained for process in working) and not (self.throttled or self.distrusted)

    @property
    def to_run(self) -> bool:
        """Whether all its channels are to be enabled. Also true of a container that is to be suspended if they do not all fit one list, or if its driver
        does not suspend; never of a blocked one."""
        if self.blocked:
            return False
        return (
            self.wanted or self.obstacles.partial or self.obstacles.denied or bool(self.obstacles.gpus_without_channels)
        )

    def channel_groups(self, gpu: str = "") -> list[ChannelGroup]:
        """The channel groups of all its processes on this GPU, or on all."""
        return [
            channel_group
            for process in list(self.processes.values())
            for (at, _), channel_group in list(process.channel_groups.items())
            if gpu in ("", self.grant.gpus[at].uuid)
        ]

    def block(self, *, blocked: bool) -> None:
        """Whether it must not run, whatever the policy decides."""
        self.blocked = blocked
        for channel_group in self.channel_groups():
            channel_group.held = blocked

    def is_on(self, gpu: str) -> bool:
        """Whether all of it runs on this GPU."""
        return all(channel_group.runs is ChannelState.ON for channel_group in self.channel_groups(gpu))

    def is_off(self, gpu: str) -> bool:
        """Whether all of it is suspended on this GPU."""
        return all(channel_group.runs is ChannelState.OFF for channel_group in self.channel_groups(gpu))

    def to_do(self, gpu: str) -> bool | None:
        """The switch to make on this GPU: resume, suspend or None. An outstanding enable comes first, also if the container is to be suspended, unless it
        is blocked."""
        if self.blocked:
            possible = not self.obstacles.trouble and not self.obstacles.denied
            return False if possible and any(map(_is_to_halt, self.channel_groups(gpu))) else None
        runs = {channel_group.runs for channel_group in self.channel_groups(gpu)}
        if ChannelState.UNSURE in runs and not self.obstacles.trouble and not self.obstacles.denied:
            return True
        if self.to_run:
            return True if ChannelState.OFF in runs else None
        return False if ChannelState.ON in runs and not self.obstacles.trouble else None

    def switch(self, gpu: str, on: bool, called: Callable[[], None] = lambda: None) -> int:
        """Resume or suspend all its processes on a GPU. Returns the driver's status. A failed suspend is undone completely. `called`: after each group.

        Blocks for about half a millisecond per process. Called without any lock, so a channel group may have been closed meanwhile: it returns an
        error, and its process is gone. A suspend touches only the groups that certainly run. A resume touches only those that do not certainly run; of a
        container that is to be suspended it resumes only the unsure ones, which are suspended next.
        """
        channel_groups, status = self.channel_groups(gpu), rm.OK
        if not on:
            return self.suspend(channel_groups, called)
        for channel_group in channel_groups:
            if channel_group.runs is ChannelState.UNSURE or (channel_group.runs is ChannelState.OFF and self.to_run):
                status = channel_group.resume() or status
                called()
                if self.shown_on is False:
                    self.stray.resumes(self._clock, works=self.reports_work())
        return status

    def suspend(self, channel_groups: Sequence[ChannelGroup], called: Callable[[], None] = lambda: None) -> int:
        """Suspend the groups that certainly run; of a blocked container all that may run, with their copy channels. Returns the driver's status. A failed suspend is undone completely; partial lists are skipped.

        Called without any lock, as `switch`.
        """
        status, joined = rm.OK, self.joined
        copies = self._copies and joined is not None and joined.service_class == BEST_EFFORT
        for channel_group in channel_groups:
            runs = _is_to_halt(channel_group) if self.blocked else channel_group.runs is ChannelState.ON
            if runs and not channel_group.partial:
                status = channel_group.suspend(copies=copies or self.blocked) or status
                called()
        if status != rm.OK:
            for channel_group in channel_groups:
                if channel_group.runs is ChannelState.OFF:
                    channel_group.resume()
                    called()
        return status

    def _moved(self, process: GpuTimeProcess, activity: wire.Activity, at_s: float) -> list[Event]:
        """Work began or ended: the container pays for work that was reported late, or that ran on channels while it was suspended."""
        if not process.working:
            return self._late(at_s, self.stray.ends(self.processes.values(), at_s))
        self.stray.begins(process, at_s)
        late_s = (activity.value >> wire.LATE_SHIFT) / 1e6
        return [Late(at_s, self.name, late_s)] if late_s else []

    def _late(self, at_s: float, late_s: float) -> list[Event]:
        return [Late(at_s, self.name, late_s)] if late_s and self.shown_on is False else []

    def _unsure(self, at_s: float) -> None:
        self.evidence.unsure()
        self.reports.resumed()
        self.watchdog.note_report(at_s)
        for channel_group in self.channel_groups():
            channel_group.doubt()

    def _add_up(self, at_s: float) -> None:
        if at_s > self.reports.added_until_s:
            may_run = self.shown_on is not False or self.gates
            self.reports.add_up(at_s, may_run=may_run, works=self.has_reported_work() and not self.drained)


def _is_to_halt(channel_group: ChannelGroup) -> bool:
    """Whether some of the channels that it names may run and can be suspended. Others may run for ever: no call stops these."""
    return not channel_group.partial and not channel_group.listed_are_off

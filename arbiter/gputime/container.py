"""One container as the policy of GPU time sees it: its processes, their channels, and what they say about their work.

Decides what counts as the container's work, whether all of it runs or is suspended, and what is to be switched. Beside it stand what its word is
worth (`arbiter.gputime.usage_report`), what that shows of suspends (`arbiter.gputime.suspend_evidence`), what runs meanwhile (`arbiter.gputime.stray_channels`), and why it is not suspended
(`arbiter.gputime.obstacles`).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from math import inf
from typing import Final

from arbiter.budget import Budget
from arbiter.gputime.channels import ChannelGroup, Runs
from arbiter.gputime.obstacles import Obstacles
from arbiter.gputime.process import ALL_CHANNEL_GROUPS_LIMIT, CHANNEL_GROUPS_LIMIT, Process, is_full
from arbiter.gputime.stray_channels import Loose
from arbiter.gputime.suspend_evidence import Evidence
from arbiter.gputime.timer import now_s
from arbiter.gputime.usage_report import UsageReports
from arbiter.page import Page
from vgpu.api.errors import BadDocument
from vgpu.api.grant import Grant
from vgpu.api.names import CLASSES
from vgpu.gputime import resource_manager as rm
from vgpu.gputime.events import Begin, Container, End, Event, Hint, Idle, Late, Work
from vgpu.gputime.usage import Usage
from vgpu.gputime.watchdog import ContainerWatchdog
from vgpu.protocol import wire
from vgpu.protocol.status import GpuTimeStatus

BEST_EFFORT: Final = CLASSES[-1]
FREE_WEIGHT: Final = 100.0
"""Weight of a container that requested no percentage: that of a whole GPU."""


class GpuTimeContainer:
    """A container that has channels on at least one GPU. `name` is its grant directory's."""

    def __init__(
        self,
        name: str,
        grant: Grant,
        page: Page | None,
        at_s: float,
        *,
        copies: bool = False,
        caps_unreported: bool = False,
        clock: Callable[[], float] = now_s,
    ) -> None:
        self.name = name
        self._clock = clock
        self._caps_unreported = caps_unreported
        """Does anything follow from a verdict on its word?"""
        self._copies = copies
        """Are its copy channels stopped with the others while it is best-effort?"""
        self.grant = grant
        self.page = page
        """None when the grant is gone: its processes are being hung up on."""
        self.budget = Budget(at_s)
        self.processes: dict[int, Process] = {}
        self.left: list[ChannelGroup] = []
        """Given up: to be closed outside the lock."""
        self.joined: Container | None = None
        """As the policy knows it; None = not, for want of channels."""
        self.wanted = True
        """Should it be on?"""
        self.shown_on: bool | None = None
        """As the policy knows it."""
        self.shown_working: bool | None = None
        """The same."""
        self.unheard = False
        """It has used its budget up and is not listened to: meanwhile it counts as working."""
        self.watchdog_resumes = 0
        self.watchdog = ContainerWatchdog(at_s)
        self.obstacles = Obstacles(self.processes)
        self.evidence = Evidence(self.processes)
        self.reports = UsageReports(at_s)
        self.loose = Loose()

    @property
    def gpus(self) -> frozenset[str]:
        """Where it has channels, as the policy knows it."""
        return self.joined.gpus if self.joined is not None else frozenset()

    def depends_on(self) -> frozenset[str]:
        """GPUs whose threads read its messages or switch it."""
        return self.gpus | {self.grant.gpus[0].uuid}

    def terms(self) -> Container | None:
        """What the policy is to know; None when there is nothing to switch."""
        seated = {gpu for process in self.processes.values() for gpu, _ in process.channel_groups}
        gpus = {self.grant.gpus[gpu].uuid for gpu in seated | self.obstacles.mute}
        if not gpus:
            return None
        percent = max(gpu.core_percent for gpu in self.grant.gpus if gpu.uuid in gpus)
        yields = any(process.yields for process in self.processes.values())
        silent = self.distrusted and not self.reports_work()  # its unreported work has no priority
        service_class = BEST_EFFORT if yields or silent else self.grant.service_class
        pace = self.reports.pace if silent else 1.0
        return Container(frozenset(gpus), service_class, self.grant.level, percent, percent or FREE_WEIGHT, pace)

    def says(self, number: int, activity: wire.Activity, at_s: float) -> list[Event]:
        """What a process announces for the whole container. Whether that works now is `news`."""
        self._add_up(at_s)
        process = self.processes[number]
        match activity.what:
            case wire.What.WORK | wire.What.IDLE:
                process.working, process.drained = activity.what == wire.What.WORK, False
                process.kernels_only = process.working and bool(activity.value & wire.KERNELS_ONLY)
                process.began_s = at_s if process.working else inf
                self.reports.said(self.processes.values())
                return self._moved(process, activity, at_s)
            case wire.What.STILL:
                process.kernels_only = process.kernels_only and bool(activity.value & wire.KERNELS_ONLY)
                self.reports.said(self.processes.values())
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

    def leaves(self, number: int, at_s: float) -> list[ChannelGroup]:
        """A process is not heard any more: its channel groups, which the caller closes."""
        self._add_up(at_s)
        self.evidence.behind.discard(number)
        return list(self.processes.pop(number).channel_groups.values())

    def hears(self, at_s: float, *, unheard: bool) -> None:
        """It is not listened to for a while, or is again."""
        self._add_up(at_s)
        self.unheard = unheard
        self.evidence.behind.update(self.processes)

    def stands(self, at_s: float, *, on: bool) -> None:
        """It is on or off from now on, on all of its GPUs."""
        self._add_up(at_s)
        if on:
            self.evidence.on(at_s, suspended=self.shown_on is False and not self.gates)
        else:
            self.evidence.off(at_s)
        self.shown_on = on
        self.watchdog.stands(at_s, on=on)

    def news(self, at_s: float) -> list[Event]:
        """Whether it has work, when that is not what the policy knows."""
        if self.working() is self.shown_working:
            return []
        self.shown_working = self.working()
        return [Work(at_s, self.name) if self.shown_working else Idle(at_s, self.name)]

    def weigh(self, at_s: float, seen_s: float) -> bool:
        """Since the last look the driver saw its processes compute for so long. Whether the verdict on its word changed."""
        self._add_up(at_s)
        return self.reports.weigh(at_s, seen_s)

    def ends_work(self, at_s: float, seen_s: float | None) -> bool:
        """The same, or None = it might have seen nothing of them. Whether its work ended with that."""
        self._add_up(at_s)
        return self.reports.ends(seen_s) and self.says_work()

    def contradicts(self, number: int, said: wire.Activity, at_s: float, *, silent: bool) -> bool:
        """Does this report show that suspends have no effect? `silent`: the page may not have shown that the arbiter lives. One that resumed itself is suspended
        again in any case."""
        if said.what is not wire.What.RESUMED:
            excused = self.gates or self.loose.any
            return self.evidence.said(number, said.what, at_s, off=self.shown_on is False, excused=excused)
        verdict = self.evidence.resumed(number, at_s, about_to=bool(said.value & wire.ABOUT_TO), silent=silent)
        self._unsure(at_s)
        return verdict

    def doubt(self, at_s: float) -> None:
        """It may have resumed what was suspended, as the page did not show that the arbiter lives; then on all of its GPUs."""
        self.evidence.silent(at_s)
        self._unsure(at_s)

    def caught(self, at_s: float, *, stopped: bool) -> list[Event]:
        """All of it is suspended again, if `stopped`, or resumed: what ran meanwhile is paid for."""
        if self.loose.any and stopped:
            self.evidence.off_again(at_s)
        return self._late(at_s, self.loose.caught(at_s))

    def tries(self, at_s: float) -> bool:
        """Whether it is tried from now on if it can be suspended, after it could not for a while."""
        return self.obstacles.tries(at_s) | self.evidence.effect.tries(at_s)

    def sits(self, number: int, channels: wire.Channels, fd: int | None, at_s: float) -> None:
        """A process has these channels from now on; the descriptor is ours. Raises BadDocument, and then closes it."""
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
            new = ChannelGroup(channels, taken, copies=self._copies) if taken is not None else None
        finally:
            if fd is not None:
                os.close(fd)
        old = channel_groups.pop(key, None)
        if old is not None:
            self.left.append(old)
            old.owes = new is not None and new.partial and old.runs is not Runs.ON
        if new is not None:
            if self.shown_on is False:
                self.loose.comes(at_s, works=self.processes[number].working)
            new.partial |= self.processes[number].pid in self.obstacles.exempt
            if old is not None:
                new.runs = Runs.UNSURE  # whatever it says of itself: we may have stopped what the old list names
            channel_groups[key] = new

    def sweep(self) -> list[ChannelGroup]:
        """Lists that were replaced, to be closed by the caller without the lock. What of them is still there is in the new list,
        which is started first; `owes` where that list is partial."""
        left, self.left = self.left, []
        return left

    @property
    def urgent(self) -> bool:
        """May it announce its work?"""
        return self.grant.service_class == CLASSES[0]

    def reports_work(self) -> bool:
        """Has any of its processes work, as they say and nothing contradicts? What is not listened to may say so."""
        return self.unheard or (not self.reports.ended_work.ended and self.says_work())

    def says_work(self) -> bool:
        """Has any of its processes work, by its own word? Work that the driver does not see stands still, perhaps."""
        return any(process.working for process in self.processes.values())

    def working(self) -> bool:
        """Does it count as having work? Always, when its word does not count."""
        return self.reports_work() or (self.distrusted and bool(self.processes))

    @property
    def distrusted(self) -> bool:
        """Does its word not count, because the driver has seen it compute without one?"""
        return self._caps_unreported and self.reports.unreported_work.proven

    @property
    def gates(self) -> bool:
        """Are its launches delayed while it is to be off?"""
        return self.obstacles.any or self.evidence.effect.gates

    @property
    def empty(self) -> bool:
        """Has none of its processes a channel, nor work or a context that says that there are some?"""
        known = any(process.channel_groups or process.working for process in list(self.processes.values()))
        return not known and not self.obstacles.mute

    @property
    def drained(self) -> bool:
        """Does all that it has to do wait at its gate, as its processes say and nothing contradicts? Then it is as if suspended."""
        working = [process for process in self.processes.values() if process.working]
        return bool(working) and all(process.drained for process in working) and not (self.unheard or self.distrusted)

    def status(self, usage: Usage, credit_s: float, at_s: float) -> GpuTimeStatus:
        """For people and metrics."""
        return GpuTimeStatus(
            on=self.shown_on is not False,
            working=self.reports_work(),
            processes=sum(1 for process in self.processes.values() if process.channel_groups),
            requested_percent=max(gpu.core_percent for gpu in self.grant.gpus),
            on_s=usage.on_s,
            off_s=usage.off_s,
            capped_s=usage.capped_s,
            suspends=usage.suspends,
            trouble=self.obstacles.why,
            mode="gate" if self.gates or self.evidence.effect.doubted else "suspend",
            watchdog_resumes=self.watchdog_resumes,
            clearing_s=usage.clearing_s,
            suspended_s=usage.suspended_s,
            arrivals=usage.arrivals,
            credit_s=credit_s,
            unreported=self.reports.unreported_work.proven,
            stopped=self.watchdog.stopped(at_s),
            seen_s=self.reports.seen_s,
            resumes=self.evidence.resumes,
        )

    @property
    def to_run(self) -> bool:
        """Are all its channels to be enabled? Also of one that is to be suspended, where a list does not take them all or its driver does
        not suspend."""
        return self.wanted or self.obstacles.partial or self.obstacles.denied or bool(self.obstacles.mute)

    def channel_groups(self, gpu: str) -> list[ChannelGroup]:
        """Of all its processes, on this GPU."""
        return [
            channel_group
            for process in list(self.processes.values())
            for (at, _), channel_group in list(process.channel_groups.items())
            if self.grant.gpus[at].uuid == gpu
        ]

    def is_on(self, gpu: str) -> bool:
        """Does everything run there?"""
        return all(channel_group.runs is Runs.ON for channel_group in self.channel_groups(gpu))

    def is_off(self, gpu: str) -> bool:
        """Is everything stopped there?"""
        return all(channel_group.runs is Runs.OFF for channel_group in self.channel_groups(gpu))

    def to_do(self, gpu: str) -> bool | None:
        """What to switch there: on, off, or nothing. An enable that is owed comes first, also for one that is to be suspended."""
        runs = {channel_group.runs for channel_group in self.channel_groups(gpu)}
        if Runs.UNSURE in runs and not self.obstacles.trouble and not self.obstacles.denied:
            return True
        if self.to_run:
            return True if Runs.OFF in runs else None
        return False if Runs.ON in runs and not self.obstacles.trouble else None

    def switch(self, gpu: str, on: bool) -> int:
        """Start or stop all its processes on a GPU: the driver's status. A stop that fails is taken back whole.

        Blocks for about half a millisecond a process. Called without any lock, so the channel groups are those of a moment ago: one that
        was closed meanwhile answers with an error, and its process is gone. To stop touches what runs for certain. To start touches what does not run for certain; who
        is to be off has only what is unsure started, and is stopped next.
        """
        channel_groups, status = self.channel_groups(gpu), rm.OK
        if not on:
            return self.stop(channel_groups)
        for channel_group in channel_groups:
            if channel_group.runs is Runs.UNSURE or (channel_group.runs is Runs.OFF and self.to_run):
                status = channel_group.resume() or status
                if self.shown_on is False:
                    self.loose.resumes(self._clock, works=self.says_work())
        return status

    def stop(self, channel_groups: Sequence[ChannelGroup]) -> int:
        """Stop what runs for certain of these: the driver's status. One that fails is taken back whole; a partial list is left alone.

        Called without any lock, as `switch`.
        """
        status, joined = rm.OK, self.joined
        copies = self._copies and joined is not None and joined.service_class == BEST_EFFORT
        for channel_group in channel_groups:
            if channel_group.runs is Runs.ON and not channel_group.partial:
                status = channel_group.suspend(copies=copies) or status
        if status != rm.OK:
            for channel_group in channel_groups:
                if channel_group.runs is Runs.OFF:
                    channel_group.resume()
        return status

    def _moved(self, process: Process, activity: wire.Activity, at_s: float) -> list[Event]:
        """Work began or ended: what of it was reported late, or is on channels that run though the container is suspended, is paid for."""
        if not process.working:
            return self._late(at_s, self.loose.ends(self.processes.values(), at_s))
        self.loose.begins(process, at_s)
        late_s = (activity.value >> wire.LATE_SHIFT) / 1e6
        return [Late(at_s, self.name, late_s)] if late_s else []

    def _late(self, at_s: float, late_s: float) -> list[Event]:
        return [Late(at_s, self.name, late_s)] if late_s and self.shown_on is False else []

    def _unsure(self, at_s: float) -> None:
        self.evidence.unsure()
        self.reports.resumed()
        self.watchdog.heard(at_s)
        for process in self.processes.values():
            for channel_group in process.channel_groups.values():
                if channel_group.runs is Runs.OFF:
                    channel_group.runs = Runs.UNSURE

    def _add_up(self, at_s: float) -> None:
        if at_s > self.reports.added_until_s:
            may_run = self.shown_on is not False or self.gates
            self.reports.add_up(at_s, may_run=may_run, works=self.reports_work() and not self.drained)

"""Why a container is not suspended: its GPUs or their driver, a refusal, channels that no list names, a process that is never suspended.

Decides whether one of these stands in the way now, which of them the status names, and when a refusal is tried again.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import inf
from typing import Final

from arbiter.gputime.process import Process
from arbiter.identity import Identity, named
from vgpu.api.enforcement import NO_CHANNELS_S
from vgpu.gputime import resource_manager as rm
from vgpu.gputime.trial import Suspending

TRY_AGAIN_S: Final = 10.0
TRY_AGAIN_MOST_S: Final = 600.0
"""A suspend that the driver refused is tried again after so long, and after twice as long each time. Guessed."""
PARTIAL: Final = f"a process has more than {rm.CHANNELS_LIMIT} compute channels on a GPU, which one list cannot name"
MUTE: Final = "a process has had a context for two seconds and reported no channels"


class Obstacles:
    """Of one container. `processes`: by the number of their connections."""

    def __init__(self, processes: Mapping[int, Process]) -> None:
        self.suspending = Suspending()
        """What the trial of this boot says of its GPUs."""
        self.trouble = ""
        """What the driver answered when it refused; empty = it did not."""
        self.failures = 0
        """Suspends that it refused."""
        self.exempt: Mapping[int, str] = {}
        """Host pids of its processes that are never suspended, and why."""
        self.contexts_s: dict[tuple[Identity, int], float] = {}
        """Since when each process has had a context on each GPU of the grant."""
        self.mute: frozenset[int] = frozenset()
        """GPUs of the grant on which a process has had a context for long and reported no channels."""
        self.complained_at_s = -inf
        self.reported_partial = self.reported_no_trial = False
        self._processes = processes
        self._try_at_s, self._try_wait_s = inf, TRY_AGAIN_S
        """When the driver is asked again to suspend it, after a refusal, and how long after."""

    @property
    def any(self) -> bool:
        """Does one stand in the way?"""
        return self.denied or bool(self.trouble) or self.partial or bool(self.mute)

    @property
    def why(self) -> str:
        """For people; empty = none is known."""
        exempt = (self.exempt[p.pid] for p in self._processes.values() if p.pid in self.exempt)
        partial = PARTIAL if self.unlisted else MUTE if self.mute else next(exempt, "")
        return self.suspending.why or self.trouble or partial

    @property
    def denied(self) -> bool:
        """Is it never suspended, because of its GPUs or their driver? Then the driver is asked to resume nothing either, unless it is
        stopped: what a call does there is not known."""
        return self.suspending.reason is not None

    @property
    def partial(self) -> bool:
        """Has any of its processes more channels on a GPU than a list takes, or is one never suspended?"""
        return any(
            channel_group.partial
            for process in list(self._processes.values())
            for channel_group in list(process.channel_groups.values())
        )

    @property
    def unlisted(self) -> bool:
        """Has any of its processes more channels on a GPU than a list takes?"""
        return any(
            channel_group.channels.unlisted
            for process in self._processes.values()
            for channel_group in process.channel_groups.values()
        )

    def spare(self, pids: Mapping[int, str]) -> None:
        """From now on these processes are never suspended. One that is suspended is resumed."""
        self.exempt = pids
        for process in self._processes.values():
            for channel_group in process.channel_groups.values():
                channel_group.partial = channel_group.channels.unlisted or process.pid in pids

    def falls_mute(self, at_s: float, gpus: int) -> bool:
        """Whether it is otherwise than before on which of its GPUs a process reports no channels."""
        seated = {
            (named(p.pid, p.pid_in_container), gpu) for p in self._processes.values() for gpu, _ in p.channel_groups
        }
        silent = (
            gpu
            for (process, gpu), since in self.contexts_s.items()
            if at_s - since >= NO_CHANNELS_S and (process, gpu) not in seated and gpu < gpus
        )
        before, self.mute = self.mute, frozenset(silent)
        return self.mute != before

    def refused(self, at_s: float, why: str) -> None:
        """The driver refused to suspend or resume it. It is asked again later, or when there are other channels."""
        self.trouble = self.trouble or why
        self._try_at_s = at_s + self._try_wait_s
        self._try_wait_s = min(2 * self._try_wait_s, TRY_AGAIN_MOST_S)

    def suspended(self) -> None:
        """The driver suspended it."""
        self._try_wait_s = TRY_AGAIN_S

    def tries(self, at_s: float) -> bool:
        """Whether it is tried from now on if the driver suspends it, after it refused."""
        again = bool(self.trouble) and at_s >= self._try_at_s
        if again:
            self.trouble = ""
        return again

    def changed_channels(self) -> None:
        """What is known of its channels is of others."""
        self.trouble = ""

"""Why a container is not suspended: its GPUs or their driver, a refusal, unlisted channels, a process that is never suspended.

Decides whether one of these obstacles exists now, which of them the status names, and when to retry after a refusal.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import inf
from typing import Final

from arbiter.gputime.process import GpuTimeProcess
from arbiter.identity import Identity, named
from vgpu.api.enforcement import NO_CHANNELS_S
from vgpu.gputime import resource_manager as rm
from vgpu.gputime.trial_verdict import Suspendability

TRY_AGAIN_S: Final = 10.0
TRY_AGAIN_MOST_S: Final = 600.0
"""Wait before the retry of a suspend that the driver refused; doubled for each further retry. Guessed."""
PARTIAL: Final = f"a process has more than {rm.CHANNELS_LIMIT} compute channels on a GPU, which one list cannot name"
NO_CHANNELS: Final = "a process has had a context for two seconds and reported no channels"


class Obstacles:
    """The obstacles of one container. `processes`: by the number of their connections."""

    def __init__(self, processes: Mapping[int, GpuTimeProcess]) -> None:
        self.suspending = Suspendability()
        """The verdict of this boot's trial on its GPUs."""
        self.trouble = ""
        """The driver's answer when it refused; empty = it did not."""
        self.failures = 0
        """Suspends that it refused."""
        self.exempt: Mapping[int, str] = {}
        """Host pids of its processes that are never suspended, and why."""
        self.contexts_s: dict[tuple[Identity, int], float] = {}
        """Since when each process has had a context on each GPU of the grant."""
        self.gpus_without_channels: frozenset[int] = frozenset()
        """GPUs of the grant on which a process has had a context for long and reported no channels."""
        self.complained_at_s = -inf
        self.reported_partial = self.reported_no_trial = False
        self._processes = processes
        self._try_at_s, self._try_wait_s = inf, TRY_AGAIN_S
        """The time of the next attempt to suspend it after a refusal, and the wait before it."""

    @property
    def any(self) -> bool:
        """Whether an obstacle exists."""
        return self.denied or bool(self.trouble) or self.partial or bool(self.gpus_without_channels)

    @property
    def why(self) -> str:
        """The reason, for the operator; empty = none is known."""
        exempt = (self.exempt[p.pid] for p in self._processes.values() if p.pid in self.exempt)
        partial = PARTIAL if self.unlisted else NO_CHANNELS if self.gpus_without_channels else next(exempt, "")
        return self.suspending.why or self.trouble or partial

    @property
    def denied(self) -> bool:
        """Whether it is never suspended, because of its GPUs or their driver. Then the arbiter makes no call to resume it either, unless it is
        suspended: the effect of a call there is unknown."""
        return self.suspending.reason is not None

    @property
    def partial(self) -> bool:
        """Whether a process has more channels on a GPU than fit one list, or is never suspended."""
        return any(
            channel_group.partial
            for process in list(self._processes.values())
            for channel_group in list(process.channel_groups.values())
        )

    @property
    def unlisted(self) -> bool:
        """Whether a process has more channels on a GPU than fit one list."""
        return any(
            channel_group.channels.unlisted
            for process in self._processes.values()
            for channel_group in process.channel_groups.values()
        )

    def set_exempt(self, pids: Mapping[int, str]) -> None:
        """Set the processes that are never suspended. One that is suspended now is resumed."""
        self.exempt = pids
        for process in self._processes.values():
            for channel_group in process.channel_groups.values():
                channel_group.partial = channel_group.channels.unlisted or process.pid in pids

    def without_channels(self) -> dict[tuple[Identity, int], float]:
        """Since when each process has had a context on a GPU on which it reports no channels."""
        seated = {
            (named(p.pid, p.pid_in_container), gpu) for p in self._processes.values() for gpu, _ in p.channel_groups
        }
        return {key: since for key, since in self.contexts_s.items() if key not in seated}

    def check_channels(self, at_s: float, gpus: int) -> bool:
        """Returns whether the set of GPUs on which a process reports no channels for long has changed."""
        silent = (
            gpu for (_, gpu), since in self.without_channels().items() if at_s - since >= NO_CHANNELS_S and gpu < gpus
        )
        before, self.gpus_without_channels = self.gpus_without_channels, frozenset(silent)
        return self.gpus_without_channels != before

    def refused(self, at_s: float, why: str) -> None:
        """The driver refused to suspend or resume it. The arbiter retries later, or when the channels change."""
        self.trouble = self.trouble or why
        self._try_at_s = at_s + self._try_wait_s
        self._try_wait_s = min(2 * self._try_wait_s, TRY_AGAIN_MOST_S)

    def suspended(self) -> None:
        """The driver suspended it."""
        self._try_wait_s = TRY_AGAIN_S

    def tries(self, at_s: float) -> bool:
        """Returns whether a retry begins after a refusal."""
        again = bool(self.trouble) and at_s >= self._try_at_s
        if again:
            self.trouble = ""
        return again

    def changed_channels(self) -> None:
        """Its channels changed: discard the facts about the earlier ones."""
        self.trouble = ""

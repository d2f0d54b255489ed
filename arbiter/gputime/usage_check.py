"""The driver's count of GPU time by process, compared with the usage reports of containers.

NVML tells for each process how much of the time since the last look it kept a GPU's multiprocessors busy. This thread reads that
once a second and adds it up by container: its connected processes, and those in whose namespace its grant is mounted (for runs:
that were started with it). `vgpu.gputime.activity_check` and `NodeScheduler` decide what follows from it. Without NVML, or where it does not count by
process (MIG), all reports count; a GPU that does not answer keeps no other GPU's containers from being checked.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Mapping, Set
from pathlib import Path
from typing import Final

import structlog

from arbiter import host
from arbiter.gputime.scheduler import NodeScheduler
from arbiter.gputime.timer import now_s
from nvml.errors import NvmlError
from nvml.messages import WHOLE, Busy
from nvml.queries import Nvml

PERIOD_S: Final = 1.0
"""Guessed: NVML's samples are up to a second long."""
REMEMBERED_US: Final = 2_000_000
"""A look goes no further back, so that idleness before it does not thin out what is seen. Guessed: two periods."""
AHEAD_US: Final = 1_000_000
"""A sample from later than this was taken before the clock was set back. Guessed."""
CLOSE_S: Final = 1.0
"""So long an end waits for an answer of NVML. Guessed: it takes milliseconds."""
_log = structlog.get_logger()


class UsageCheck:
    """See the module. `nvml` is for this thread alone. `grants`: the grants folder; `named_in`: the same, for an arbiter of runs."""

    def __init__(self, scheduler: NodeScheduler, nvml: Nvml, grants: Path, named_in: Path | None = None) -> None:
        self._scheduler, self._nvml, self._grants, self._named_in = scheduler, nvml, grants, named_in
        self._closing = threading.Event()
        self._seen_us: dict[str, int] = {}
        self._owners: dict[tuple[int, int], str | None] = {}
        """Process, by pid and start -> its container."""
        self._trouble: dict[str, str] = {}
        """GPU, or empty for all -> why it was not read last, which the log has."""
        self._thread = threading.Thread(target=self._run, name="usage check", daemon=True)

    def start(self) -> None:
        """Begin reading."""
        self._thread.start()

    def close(self) -> None:
        """End the thread, unless it waits for NVML: then it ends with the program."""
        self._closing.set()
        if self._thread.ident is not None:
            self._thread.join(CLOSE_S)

    def _run(self) -> None:
        try:
            while not self._closing.wait(PERIOD_S):
                try:
                    self._look()
                except NvmlError as error:
                    self._complain("", str(error))
        except Exception:  # noqa: BLE001 - a check that ends is not worth an arbiter
            _log.exception("usage reports are not compared with the GPU time that NVML counts any more")

    def _look(self) -> None:
        """Raises NvmlError when no GPU answers."""
        watched = self._scheduler.watched()
        gpus: dict[str, tuple[Busy, float]] = {}
        failed = None
        for uuid, found in self._look_at(sorted({uuid for uuids, _ in watched.values() for uuid in uuids})).items():
            if isinstance(found, NvmlError):
                failed = found
                self._complain(uuid, str(found))
            else:
                gpus[uuid] = found
                self._trouble.pop(uuid, None)
        if failed is not None and not gpus:
            raise failed
        self._trouble.pop("", None)
        pids = {pid for look, _ in gpus.values() for pid in look.percent}
        connected = frozenset(pid for _, of in watched.values() for pid in of)
        self._scheduler.usage_check(
            add_up(watched, gpus, self._owners_of(pids, connected)), seen_whole(watched, gpus), now_s()
        )

    def _look_at(self, uuids: Iterable[str]) -> dict[str, tuple[Busy, float] | NvmlError]:
        """Who computed there since the last look, and how long that was in seconds: up to the driver's latest sample. Raises NvmlAway."""
        at_us = time.time_ns() // 1000
        since_us = {uuid: look_since_us(self._seen_us.get(uuid, 0), at_us) for uuid in uuids}
        found: dict[str, tuple[Busy, float] | NvmlError] = {}
        for uuid, look in self._nvml.busy_of(since_us, at_us + AHEAD_US).items():
            if isinstance(look, NvmlError):
                found[uuid] = look
            else:
                self._seen_us[uuid] = look.seen_us
                found[uuid] = look, (look.seen_us - since_us[uuid]) / 1e6
        return found

    def _complain(self, gpu: str, why: str) -> None:
        """Once for each reason, until it is over."""
        if self._trouble.get(gpu) != why:
            _log.warning("usage reports are not compared with the GPU time that NVML counts", gpu=gpu, reason=why)
        self._trouble[gpu] = why

    def _owners_of(self, pids: Iterable[int], connected: Set[int]) -> dict[int, str]:
        """Container of each process that has one's grant mounted, or, where it is not connected, that its cgroup names. What is known of a
        process that lives is not looked up again."""
        known = {(pid, host.started_at(pid)): pid for pid in pids}
        self._owners = {
            who: self._owners[who] if self._owners.get(who) else host.key_shown(pid, self._grants, self._named_in)
            for who, pid in known.items()
        }
        owners = {
            pid: self._owners[who] or (None if pid in connected else host.key_of(pid, self._grants, self._named_in))
            for who, pid in known.items()
        }
        return {pid: owner for pid, owner in owners.items() if owner}


def look_since_us(seen_us: int, at_us: int) -> int:
    """From when a look at `at_us` counts, when the last one saw samples up to `seen_us`. Later than now means that the clock was
    set back since: what was seen is forgotten."""
    return max(seen_us if seen_us <= at_us + AHEAD_US else 0, at_us - REMEMBERED_US)


def seen_whole(
    watched: Mapping[str, tuple[frozenset[str], frozenset[int]]], gpus: Mapping[str, tuple[Busy, float]]
) -> frozenset[str]:
    """The containers of which the driver would have shown it if they had computed: all of their GPUs count by process."""
    return frozenset(
        name
        for name, (uuids, _) in watched.items()
        if uuids and all(uuid in gpus and gpus[uuid][0].by_process for uuid in uuids)
    )


def add_up(
    watched: Mapping[str, tuple[frozenset[str], frozenset[int]]],
    gpus: Mapping[str, tuple[Busy, float]],
    owners: Mapping[int, str],
) -> dict[str, float]:
    """For how many seconds each container computed: on the GPU of its GPUs where it did most.

    `watched`: GPUs and connected processes of each. `gpus`: those that answered, with the seconds that the look covers; a container
    with none of them is left out. A process whose mount says that it is another container's is that one's.
    """
    seconds = {}
    for name, (uuids, connected) in watched.items():
        looks = [gpus[uuid] for uuid in uuids if uuid in gpus]
        parts = [
            sum(
                percent
                for pid, percent in look.percent.items()
                if (owners[pid] == name if pid in owners else pid in connected)
            )
            for look, _ in looks
        ]
        if looks:
            seconds[name] = max(
                min(1.0, part / WHOLE) * covered_s for part, (_, covered_s) in zip(parts, looks, strict=True)
            )
    return seconds

"""Compares the driver's count of GPU time by process with the usage reports of containers.

NVML counts for each process how much of the time since the last reading it kept a GPU's multiprocessors busy. This thread reads that
once a second and adds it up by container: its connected processes, and those whose mount namespace has its grant (for runs:
those started with it). `vgpu.gputime.activity_check` and `NodeScheduler` decide what follows. Without NVML, or if it does not count by
process (MIG), all reports count; a GPU that does not answer does not prevent the check of other GPUs' containers.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Set
from pathlib import Path
from typing import Final

import structlog

from arbiter import host
from arbiter.gputime.node_scheduler import NodeScheduler
from arbiter.gputime.timer import now_s
from arbiter.reader_thread import ReaderThread
from nvml.errors import NvmlError
from nvml.messages import WHOLE, Busy
from nvml.queries import Nvml

PERIOD_S: Final = 1.0
"""Guessed: NVML's samples are up to a second long."""
REMEMBERED_US: Final = 2_000_000
"""Longest time that a reading covers, so that earlier idleness does not dilute the measured activity. Guessed: two periods."""
AHEAD_US: Final = 1_000_000
"""A sample with a time further in the future than this was taken before the clock was set back. Guessed."""
_log = structlog.get_logger()


class UsageCheck:
    """See the module. Only this thread uses `nvml`. `grants`: the grants folder; `named_in`: the same, for an arbiter of runs."""

    def __init__(self, scheduler: NodeScheduler, nvml: Nvml, grants: Path, named_in: Path | None = None) -> None:
        self._scheduler, self._nvml, self._grants, self._named_in = scheduler, nvml, grants, named_in
        self._reader = ReaderThread("usage check", self._run)
        self._seen_us: dict[str, int] = {}
        self._owners: dict[tuple[int, int], str | None] = {}
        """Process, by pid and start -> its container."""
        self._trouble: dict[str, str] = {}
        """GPU, or empty for all -> the logged reason of the last failed reading."""

    def start(self) -> None:
        """Begin reading. Raises RuntimeError if no thread can start."""
        self._reader.start()

    def close(self) -> None:
        """End the thread. If it waits for NVML, it ends with the program."""
        self._reader.close()

    def _run(self) -> None:
        try:
            while not self._reader.pause(PERIOD_S):
                try:
                    self._check()
                except NvmlError as error:
                    self._complain("", str(error))
        except Exception:  # noqa: BLE001 - the arbiter must not end because the check failed
            _log.exception("usage reports are not compared with the GPU time that NVML counts any more")

    def _check(self) -> None:
        """Raises NvmlError if no GPU answers."""
        watched = self._scheduler.watched()
        gpus: dict[str, tuple[Busy, float]] = {}
        failed = None
        for uuid, found in self._busy(sorted({uuid for uuids, _ in watched.values() for uuid in uuids})).items():
            if isinstance(found, NvmlError):
                failed = found
                self._complain(uuid, str(found))
            else:
                gpus[uuid] = found
                self._trouble.pop(uuid, None)
        if failed is not None and not gpus:
            raise failed
        self._trouble.pop("", None)
        pids = {pid for reading, _ in gpus.values() for pid in reading.percent}
        connected = frozenset(pid for _, of in watched.values() for pid in of)
        self._scheduler.usage_check(
            add_up(watched, gpus, self._owners_of(pids, connected)), seen_whole(watched, gpus), now_s()
        )

    def _busy(self, uuids: Iterable[str]) -> dict[str, tuple[Busy, float] | NvmlError]:
        """By GPU, the processes that computed since the last reading, and the covered seconds: up to the driver's latest sample. Raises NvmlAway."""
        at_us = time.time_ns() // 1000
        since_us = {uuid: read_since_us(self._seen_us.get(uuid, 0), at_us) for uuid in uuids}
        found: dict[str, tuple[Busy, float] | NvmlError] = {}
        for uuid, reading in self._nvml.busy_of(since_us, at_us + AHEAD_US).items():
            if isinstance(reading, NvmlError):
                found[uuid] = reading
            else:
                self._seen_us[uuid] = reading.seen_us
                found[uuid] = reading, (reading.seen_us - since_us[uuid]) / 1e6
        return found

    def _complain(self, gpu: str, why: str) -> None:
        """Log each reason once, until it ends."""
        if self._trouble.get(gpu) != why:
            _log.warning("usage reports are not compared with the GPU time that NVML counts", gpu=gpu, reason=why)
        self._trouble[gpu] = why

    def _owners_of(self, pids: Iterable[int], connected: Set[int]) -> dict[int, str]:
        """The container of each process, by the grant mounted in its namespace or, for an unconnected process, by its cgroup. A process that is
        alive is looked up once only."""
        known = {(pid, host.started_at(pid)): pid for pid in pids}
        self._owners = {
            identity: self._owners[identity]
            if self._owners.get(identity)
            else host.key_shown(pid, self._grants, self._named_in)
            for identity, pid in known.items()
        }
        owners = {
            pid: self._owners[identity]
            or (None if pid in connected else host.key_of(pid, self._grants, self._named_in))
            for identity, pid in known.items()
        }
        return {pid: owner for pid, owner in owners.items() if owner}


def read_since_us(seen_us: int, at_us: int) -> int:
    """The start of the time that a reading at `at_us` covers, if the last one had samples up to `seen_us`. If that is in the future, the clock was
    set back since, and the earlier samples are ignored."""
    return max(seen_us if seen_us <= at_us + AHEAD_US else 0, at_us - REMEMBERED_US)


def seen_whole(
    watched: Mapping[str, tuple[frozenset[str], frozenset[int]]], gpus: Mapping[str, tuple[Busy, float]]
) -> frozenset[str]:
    """The containers whose GPU time the driver counts completely: all of their GPUs count by process."""
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
    """Seconds of GPU time by container: on the one of its GPUs with the most.

    `watched`: GPUs and connected processes by container. `gpus`: the GPUs that answered, with the seconds that the reading covers; a container
    with none of them is omitted. A process that has another container's mount counts for that container.
    """
    seconds = {}
    for name, (uuids, connected) in watched.items():
        readings = [gpus[uuid] for uuid in uuids if uuid in gpus]
        parts = [
            sum(
                percent
                for pid, percent in reading.percent.items()
                if (owners[pid] == name if pid in owners else pid in connected)
            )
            for reading, _ in readings
        ]
        if readings:
            seconds[name] = max(
                min(1.0, part / WHOLE) * covered_s for part, (_, covered_s) in zip(parts, readings, strict=True)
            )
    return seconds

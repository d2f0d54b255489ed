"""Finds the container whose processes have a GPU open on which NVML lists some used memory for no process, so that the report can name it.

The device plugin reads descriptors, as it reads maps (`nvml.descriptors`); the arbiter chooses the processes: those of the GPU's containers, by cgroup, that
NVML lists nowhere and that are not connected. An open GPU is no proof of memory: a container is named only if no other has such a process, in two
searches, and the only effect is the report.

It has its own thread, because a search takes seconds at worst. The thread sleeps unless there is such memory.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import structlog

from arbiter import host
from arbiter.host import MOST_PIDS
from arbiter.reader_thread import ReaderThread
from nvml.errors import NvmlError
from nvml.messages import MOST_MAPS
from nvml.queries import Nvml
from vgpu.api.cgroup import CgroupOwner
from vgpu.memory.attribution import Owners
from vgpu.memory.unlisted import suspected

EVERY_S: Final = 1.0
"""Shortest time between two searches. Guessed: a reading comes each second."""
PART: Final = 10
"""The pause after a search is at least this many times its duration: a process of one thread costs
0.06 ms, one of 100 threads and 100 descriptors 70 ms on a busy machine (measured)."""
SEARCH_S: Final = 5.0
"""Time limit of one search. After it, the result is unknown. Guessed: a search of 1,000 processes takes 0.1 s."""
MOST_SEARCHED: Final = 256
"""Largest number of processes of a GPU's containers that are examined; with more, the result is unknown. Guessed."""
_log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class OpenerSearch:
    """GPUs with such memory, and facts about the node. `keys`: UUID -> the grants there."""

    keys: Mapping[str, frozenset[str]] = field(default_factory=dict)
    owners: Owners = field(default_factory=lambda: Owners(()))
    known: frozenset[int] = frozenset()
    """Pids that NVML lists on some GPU, or that are connected."""


@dataclass(frozen=True, slots=True)
class Opener:
    """A container, by its key, and its processes that have a GPU open."""

    key: str
    pids: tuple[int, ...]


class DeviceOpeners:
    """See the module. Only this thread uses `nvml`."""

    def __init__(
        self,
        nvml: Nvml,
        place: Callable[[int], CgroupOwner] = host.place,
        started: Callable[[int], int] = host.started_at,
        proc: Path = Path("/proc"),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.found: Mapping[str, Opener] = {}
        """By GPU. Replaced as a whole, so that other threads may read it at any time."""
        self._nvml, self._place, self._started, self._proc, self._clock = nvml, place, started, proc, clock
        self._reader = ReaderThread("openers", self._run)
        self._changed = self._reader.changed
        self._wanted = OpenerSearch()
        self._last: dict[str, str] = {}
        """GPU -> the key that the last search found."""
        self._trouble = ""

    def start(self) -> None:
        """Begin. Raises RuntimeError if no thread can start."""
        self._reader.start()

    def close(self) -> None:
        """End the thread. If it waits for an answer, it ends with the program."""
        self._reader.close()

    def want(self, wanted: OpenerSearch) -> None:
        """Set the GPUs of the next searches; none = no search."""
        with self._changed:
            self._wanted = wanted
            self._last = {uuid: key for uuid, key in self._last.items() if uuid in wanted.keys}
            self.found = {uuid: one for uuid, one in self.found.items() if one.key in wanted.keys.get(uuid, ())}
            self._changed.notify()

    def search(self) -> None:
        """Search once on all wanted GPUs. Raises NvmlError."""
        with self._changed:
            wanted = self._wanted
        of = self._candidates(wanted)
        opens = self._opens(tuple(of)) if of else {}
        now: dict[str, Opener] = {}
        for uuid, there in wanted.keys.items():
            here = {pid: keys for pid, keys in of.items() if not there.isdisjoint(keys)}
            key = suspected((keys, opens[pid]) for pid, keys in here.items())
            if key is not None:
                now[uuid] = Opener(key, tuple(sorted(pid for pid in here if opens[pid])))
        with self._changed:
            requested = self._wanted.keys
            before, self._last = self._last, {uuid: one.key for uuid, one in now.items() if uuid in requested}
            self.found = {
                uuid: one
                for uuid, one in now.items()
                if before.get(uuid) == one.key and one.key in requested.get(uuid, ())
            }

    def _run(self) -> None:
        while True:
            with self._changed:
                self._reader.wait(lambda: self._wanted.keys)
                if self._reader.closing:
                    return
            began_s = self._clock()
            try:
                self.search()
                self._trouble = ""
            except Exception as error:  # noqa: BLE001 - without it no container is named; the memory is reported all the same
                self._fails(error)
            self._reader.pause(max(EVERY_S, PART * (self._clock() - began_s)))

    def _fails(self, error: Exception) -> None:
        self.found, self._last = {}, {}
        if str(error) != self._trouble:
            _log.warning("no container is named for memory that NVML lists for no process", reason=str(error))
        self._trouble = str(error)

    def _candidates(self, wanted: OpenerSearch) -> dict[int, tuple[str, ...]]:
        """Pid -> the grants to which it may belong, for processes in the containers of these GPUs that are neither listed nor connected. Raises NvmlError
        if there are too many."""
        there = frozenset[str]().union(*wanted.keys.values())
        found: dict[int, tuple[str, ...]] = {}
        pids = host.pids(MOST_PIDS + 1, self._proc)
        if len(pids) > MOST_PIDS:
            raise NvmlError(f"the node has more than {MOST_PIDS} processes")
        for pid in pids:
            if pid in wanted.known or not (at := self._place(pid)).pod:
                continue
            keys = wanted.owners.of(at, None)
            if not there.isdisjoint(keys):
                found[pid] = keys
        if len(found) > MOST_SEARCHED:
            raise NvmlError(
                f"containers of these GPUs have {len(found)} processes: at most {MOST_SEARCHED} are searched"
            )
        return found

    def _opens(self, pids: tuple[int, ...]) -> dict[int, bool | None]:
        """Whether each process has a GPU open. A process that has ended meanwhile has none."""
        until_s = self._clock() + SEARCH_S
        processes = [(pid, self._started(pid)) for pid in pids]
        found: dict[int, bool | None] = dict.fromkeys(pids)
        for at in range(0, len(processes), MOST_MAPS):
            if self._clock() >= until_s:
                break
            batch = tuple(processes[at : at + MOST_MAPS])
            found |= {pid: has for (pid, _), has in zip(batch, self._nvml.gpu_open(batch), strict=True)}
        for pid, started in processes:
            if found[pid] is None and (started == 0 or self._started(pid) != started):
                found[pid] = False
        return found

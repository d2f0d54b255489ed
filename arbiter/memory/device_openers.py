"""Whose processes have a GPU open on which memory is in use that NVML lists for no process: so one container may be named that may hold it.

The device plugin reads descriptors, as it reads maps (`nvml.descriptors`); the arbiter says of which processes: those of the GPU's containers, by cgroup, that
NVML lists nowhere and that are not connected. An open GPU is no proof of memory: a container is named where no other has such a process, in two looks, and
nothing follows but the report.

A thread of its own, since a look takes seconds at worst. It sleeps unless there is such memory.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import structlog

from arbiter import host
from arbiter.host import MOST_PIDS
from nvml.errors import NvmlError
from nvml.messages import MOST_MAPS
from nvml.queries import Nvml
from vgpu.api.cgroup import Place
from vgpu.memory.attribution import Owners
from vgpu.memory.unlisted import suspected

EVERY_S: Final = 1.0
"""Between two looks, at least. Guessed: a reading comes each second."""
PART: Final = 10
"""After a look at least so many times as long as it took passes before the next begins: a process of one thread costs
0.06 ms, one of 100 threads and 100 descriptors 70 ms on a busy machine (measured)."""
LOOK_S: Final = 5.0
"""For one look. What takes longer is not known. Guessed: one of 1,000 processes takes 0.1 s."""
MOST_LOOKED_AT: Final = 256
"""Processes of a GPU's containers that are looked at. Guessed: of a GPU with more it is unknown."""
CLOSE_S: Final = 1.0
_log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Wanted:
    """GPUs with such memory, and what is known of the node. `keys`: UUID -> the grants there."""

    keys: Mapping[str, frozenset[str]] = field(default_factory=dict)
    owners: Owners = field(default_factory=lambda: Owners(()))
    known: frozenset[int] = frozenset()
    """Pids that NVML lists somewhere, or that are connected."""


@dataclass(frozen=True, slots=True)
class Opener:
    """A container, by its key, and its processes that have a GPU open."""

    key: str
    pids: tuple[int, ...]


class Openers:
    """See the module. `nvml` is for this thread alone."""

    def __init__(
        self,
        nvml: Nvml,
        place: Callable[[int], Place] = host.place,
        started: Callable[[int], int] = host.started_at,
        proc: Path = Path("/proc"),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.found: Mapping[str, Opener] = {}
        """By GPU. Replaced as a whole, so that others may read it at any time."""
        self._nvml, self._place, self._started, self._proc, self._clock = nvml, place, started, proc, clock
        self._changed = threading.Condition()
        self._wanted = Wanted()
        self._last: dict[str, str] = {}
        """GPU -> the key that the last look found."""
        self._closing = False
        self._trouble = ""
        self._thread = threading.Thread(target=self._run, name="openers", daemon=True)

    def start(self) -> None:
        """Begin. Raises RuntimeError when there is no thread to be had."""
        self._thread.start()

    def close(self) -> None:
        """End the thread, unless it waits for an answer: then it ends with the program."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        if self._thread.ident is not None:
            self._thread.join(CLOSE_S)

    def want(self, wanted: Wanted) -> None:
        """From now on it is about these; about no GPU = there is nothing to look for."""
        with self._changed:
            self._wanted = wanted
            self._last = {uuid: key for uuid, key in self._last.items() if uuid in wanted.keys}
            self.found = {uuid: one for uuid, one in self.found.items() if one.key in wanted.keys.get(uuid, ())}
            self._changed.notify()

    def look(self) -> None:
        """At all that is wanted, once. Raises NvmlError."""
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
                self._changed.wait_for(lambda: self._closing or self._wanted.keys)
                if self._closing:
                    return
            began_s = self._clock()
            try:
                self.look()
                self._trouble = ""
            except Exception as error:  # noqa: BLE001 - without it no container is named; the memory is reported all the same
                self._fails(error)
            with self._changed:
                self._changed.wait_for(lambda: self._closing, max(EVERY_S, PART * (self._clock() - began_s)))

    def _fails(self, error: Exception) -> None:
        self.found, self._last = {}, {}
        if str(error) != self._trouble:
            _log.warning("no container is named for memory that NVML lists for no process", reason=str(error))
        self._trouble = str(error)

    def _candidates(self, wanted: Wanted) -> dict[int, tuple[str, ...]]:
        """Pid -> the grants that it may belong to, of processes in the containers of these GPUs of which nothing is known. Raises NvmlError where
        there are too many."""
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
        if len(found) > MOST_LOOKED_AT:
            raise NvmlError(
                f"containers of these GPUs have {len(found)} processes: at most {MOST_LOOKED_AT} are looked at"
            )
        return found

    def _opens(self, pids: tuple[int, ...]) -> dict[int, bool | None]:
        """Has each a GPU open? One that has ended meanwhile has none."""
        until_s = self._clock() + LOOK_S
        who = [(pid, self._started(pid)) for pid in pids]
        found: dict[int, bool | None] = dict.fromkeys(pids)
        for at in range(0, len(who), MOST_MAPS):
            if self._clock() >= until_s:
                break
            batch = tuple(who[at : at + MOST_MAPS])
            found |= {pid: has for (pid, _), has in zip(batch, self._nvml.gpu_open(batch), strict=True)}
        for pid, started in who:
            if found[pid] is None and (started == 0 or self._started(pid) != started):
                found[pid] = False
        return found

"""The host pool of runs that may burst: one copier for each of their GPUs, kept by the keeper.

Pool and sockets lie in a folder of /dev/shm that only this user may read. It outlives keeper, arbiter and copier, so that what is in it comes back, and is
removed when no run may burst any more. A copier that does not start costs the runs what is above their guarantees, and nothing else.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import stat
import subprocess
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

from tangramctl.machine import StateRoot
from tangramctl.records import Run
from vgpu.api.burst import burst_from_text
from vgpu.api.contract import BURST
from vgpu.api.errors import BadDocument

MIB: Final = 2**20
SHARED_MEMORY: Final = Path("/dev/shm")  # noqa: S108  the folder in it is checked for its owner
POOL_LIMITS: Final = 2
"""The pool of a GPU is so many times the largest limit of its runs. Guessed: two such runs take turns."""
POOL_PART: Final = 0.5
"""Of the memory that is available, at most. Guessed."""
FAILED_STARTS: Final = 3
"""Copiers of a GPU that ended in a row; no other is started. Guessed."""
STOP_S: Final = 5.0


def pool_folder(machine: StateRoot, shared_memory: Path = SHARED_MEMORY) -> Path:
    """Where pool files and copiers' sockets of a state root are."""
    name = hashlib.sha256(str(machine.root).encode()).hexdigest()[:12]
    return shared_memory / f"tangramctl-{os.geteuid()}-{name}"


def limits_mib(machine: StateRoot, there: Collection[Run]) -> dict[str, int]:
    """GPU -> the largest limit of a run that may burst there."""
    found: dict[str, int] = {}
    for run in there:
        try:
            limits = burst_from_text((machine.grants / run.key / BURST).read_text())
        except (OSError, UnicodeDecodeError, BadDocument):
            continue  # it has its guarantee
        for gpu in limits.gpus:
            found[gpu.uuid] = max(gpu.mib, found.get(gpu.uuid, 0))
    return found


def pool_mib(limit_mib: int, available_mib: int) -> int:
    """Of one GPU, an even number: a pool is of pages of 2 MiB."""
    return max(2, int(min(POOL_LIMITS * limit_mib, POOL_PART * available_mib)) // 2 * 2)


def available_mib() -> int:
    """Memory of this machine that programs can have now; 0 = unknown."""
    with suppress(OSError, ValueError), Path("/proc/meminfo").open() as file:
        for line in file:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) // 1024
    return 0


class RunCopiers:
    """See the module. `started`: prepares a child before it is executed."""

    def __init__(
        self, machine: StateRoot, log: Callable[[str], None], started: Callable[[], None], passed: Sequence[int] = ()
    ) -> None:
        self._machine, self._log, self._started, self._passed = machine, log, started, passed
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        self._failed: dict[str, int] = {}

    def keep(self, limits: Mapping[str, int]) -> None:
        """Start what is missing. `limits`: of `limits_mib`."""
        for uuid, limit_mib in limits.items():
            copier = self._running.get(uuid)
            if copier is not None and copier.poll() is None:
                continue
            if copier is not None:
                self._failed[uuid] = self._failed.get(uuid, 0) + 1
                del self._running[uuid]
                self._log(f"the copier of GPU {uuid} ended with {copier.returncode}")
            if self._failed.get(uuid, 0) < FAILED_STARTS:
                self._start(uuid, limit_mib)

    def stop(self) -> None:
        """End all. What is in the pools stays."""
        for copier in self._running.values():
            copier.terminate()
        for copier in self._running.values():
            try:
                copier.wait(STOP_S)
            except subprocess.TimeoutExpired:
                copier.kill()
                copier.wait()
        self._running.clear()

    def remove(self) -> None:
        """No run has memory in a pool."""
        self.stop()
        self._failed.clear()
        folder = pool_folder(self._machine)
        if _is_own(folder):
            shutil.rmtree(folder, ignore_errors=True)

    def _start(self, uuid: str, limit_mib: int) -> None:
        copier, folder = self._machine.copier(), pool_folder(self._machine)
        with suppress(FileExistsError):
            folder.mkdir(mode=0o700)
        if copier is None or not _is_own(folder):
            self._log(f"GPU {uuid} has no host pool: {folder} must be a folder of this user, with mode 700")
            return
        program, mib = copier
        size = (mib or pool_mib(limit_mib, available_mib())) * MIB
        pool = folder / f"{uuid}.pool"
        with suppress(OSError):
            size = max(size, pool.stat().st_size)  # it may be in use
        words = [str(program), "--gpu", uuid, "--socket", str(folder / f"{uuid}.sock"), "--pool", str(pool), "--pool-bytes", str(size)]  # fmt: skip
        env = {name: value for name, value in self._machine.driver_env().items() if name != "LD_PRELOAD"}
        if self._machine.programs is not None:
            words += ["--libraries", str(self._machine.programs)]
        self._running[uuid] = subprocess.Popen(
            words, env=os.environ | env, preexec_fn=self._started, stdin=subprocess.DEVNULL, pass_fds=self._passed
        )


def _is_own(folder: Path) -> bool:
    try:
        there = folder.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(there.st_mode) and there.st_uid == os.geteuid() and stat.S_IMODE(there.st_mode) == 0o700

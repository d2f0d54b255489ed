"""The host pool of this node: a copier for each GPU that is shared, and the status that others read.

Which GPUs are shared is the device plugin's word, read from its file once a second. A GPU that is given whole, or that an operator
releases, loses its copier and keeps its pool file; when it is shared again, a new copier registers the same file.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

import structlog

from hostpool import folders
from hostpool.copier_process import CopierProcess
from hostpool.settings import HostPoolSettings
from nvml.library import library_folder
from vgpu.api.errors import BadDocument
from vgpu.api.host_pool import (
    HEARTBEAT_S,
    NO_GPUS,
    PoolGpu,
    PoolStatus,
    SharedGpus,
    from_text,
    missing_on_node,
    to_text,
)
from vgpu.memory.pool_shares import GRAIN_BYTES, shares, too_large

LOOK_S: Final = 1.0
"""Between readings of the device plugin's file. Guessed."""
BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")

log = structlog.get_logger("hostpool")


class HostPool:
    """Runs from `run` until that is cancelled: then every copier has ended, and the status says so."""

    def __init__(self, settings: HostPoolSettings, boot_id: str, memory_bytes: int) -> None:
        self._settings, self._boot_id = settings, boot_id
        self.copiers: dict[str, CopierProcess] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._ending: set[asyncio.Task[None]] = set()
        self._shared: SharedGpus | None = None
        self._folders, wrong = folders.usable(settings.pool_dirs)
        self._refused = too_large(settings.pool_bytes, memory_bytes, settings.reserve_bytes)
        if not self._refused and not self._folders:
            self._refused = f"no folder can have the pool: {wrong}"
        self._stopped = self._unread = ""
        self._changed = asyncio.Event()
        if self._refused or wrong:
            log.error("host pool", refused=self._refused, folders=wrong)

    def status(self) -> PoolStatus:
        """As it is now."""
        sizes = folders.sizes(self._folders)
        return PoolStatus(
            boot_id=self._boot_id,
            written_s=_now_s(),
            pool_bytes=self._settings.pool_bytes,
            reason=self._stopped or self._refused or ("" if self._shared is not None else NO_GPUS),
            gpus=tuple(self._of_gpu(copier) for copier in self.copiers.values()),
            pod_uid=self._settings.pod_uid,
            left_over=tuple(sorted(sizes.keys() - self.copiers.keys())),
        )

    def not_ready(self) -> str:
        """Why some GPU of the node has no pool; empty when all have."""
        return missing_on_node(self.status(), boot_id=self._boot_id, now_s=_now_s())

    async def run(self) -> None:
        """Until cancelled. Raises OSError when the status cannot be written at the start."""
        self._settings.copiers_dir.mkdir(mode=0o755, parents=True, exist_ok=True)
        self._write()
        written_s = _now_s()
        try:
            while True:
                for task in self._tasks.values():
                    if task.done():
                        task.result()  # a fault of this program: it ends, and the kubelet starts it again
                changed = self._changed.is_set()
                self._changed.clear()
                if self._look() or changed or _now_s() - written_s >= HEARTBEAT_S:
                    written_s = _now_s()
                    self._try_to_write()
                with suppress(TimeoutError):
                    async with asyncio.timeout(LOOK_S):
                        await self._changed.wait()
        finally:
            await self._end_all()

    def _look(self) -> bool:
        """Start and end copiers as the device plugin's file has it. Returns whether something changed."""
        shared = self._read_shared()
        if shared is None or shared == self._shared or self._refused:
            return False
        log.info("GPUs of the host pool", gpus=shared.gpus, whole=shared.whole, released=shared.released)
        self._shared = shared
        for gpu in [gpu for gpu in self.copiers if gpu not in shared.served]:
            self._end(gpu)
        for gpu in shared.served:
            if gpu not in self.copiers:
                self._start(gpu)
        return True

    def _read_shared(self) -> SharedGpus | None:
        """None: there is none of this boot, or it cannot be read. Then all stays as it is."""
        try:
            found = from_text(SharedGpus, self._settings.shared_gpus.read_bytes())
        except (OSError, BadDocument) as error:
            if str(error) != self._unread and not isinstance(error, FileNotFoundError):
                log.warning("the device plugin's file of shared GPUs cannot be read", error=str(error))
            self._unread = str(error)
            return None
        self._unread = ""
        return found if found.boot_id == self._boot_id else None

    def _start(self, gpu: str) -> None:
        copier = CopierProcess(
            gpu, lambda: self._command(gpu), stall_s=self._settings.stall_s, end_s=self._settings.end_s,
            changed=self._changed.set,
        )  # fmt: skip
        self.copiers[gpu] = copier
        self._tasks[gpu] = asyncio.create_task(copier.run(), name=gpu)

    def _end(self, gpu: str) -> None:
        """Its process ends meanwhile. A new one for that GPU waits for the pool's lock, by its delays."""
        del self.copiers[gpu]
        task = self._tasks.pop(gpu)
        task.cancel()
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)

    async def _end_all(self) -> None:
        self._stopped = "its program is being stopped"
        for gpu in list(self.copiers):
            self._end(gpu)
        await asyncio.gather(*self._ending, return_exceptions=True)
        self._stopped = "its program was stopped"
        self._try_to_write()

    def _command(self, gpu: str) -> Sequence[str] | str:
        """What starts a GPU's copier now, or why none can be."""
        if self._shared is None:
            return NO_GPUS
        share = shares(self._settings.pool_bytes, self._shared.gpus, folders.sizes(self._folders)).get(gpu, 0)
        if share < GRAIN_BYTES:
            return "pool files of other GPUs take all of burst.hostPool: make it larger, or remove those of which nothing is swapped out"
        words = [str(self._settings.copier), "--gpu", gpu, "--socket", str(self._settings.copiers_dir / f"{gpu}.sock")]
        for path in folders.pool_files(self._folders, gpu):
            words += ["--pool", str(path)]
        words += ["--pool-bytes", str(share)]
        if libraries := library_folder(self._settings.driver_root):
            words += ["--libraries", str(libraries)]
        return words

    def _of_gpu(self, copier: CopierProcess) -> PoolGpu:
        file, file_id = folders.file_in_use(folders.pool_files(self._folders, copier.gpu))
        return PoolGpu(
            uuid=copier.gpu,
            ready=copier.ready,
            reason=copier.reason,
            file=file,
            file_id=file_id,
            pages=copier.progress.pages,
            pool_bytes=self.share_of(copier.gpu),
            allocated_bytes=copier.progress.allocated_bytes,
            registered_bytes=copier.progress.registered_bytes,
        )

    def share_of(self, gpu: str) -> int:
        """Bytes that a GPU's pool has or is to have."""
        if self._shared is None:
            return 0
        return shares(self._settings.pool_bytes, self._shared.gpus, folders.sizes(self._folders)).get(gpu, 0)

    def _try_to_write(self) -> None:
        try:
            self._write()
        except OSError as error:
            log.error("the status of the host pool cannot be written", error=str(error))

    def _write(self) -> None:
        path = self._settings.status_file
        fresh = path.with_name(f".{path.name}.new")
        fresh.write_bytes(to_text(self.status()))
        fresh.chmod(0o644)
        fresh.replace(path)


def _now_s() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)

"""The host pool of a node, as two files describe it: which GPUs it serves, and whether it is there.

    shared-gpus.json   the device plugin writes it, the host pool's program reads it
    status.json        the host pool's program writes it; the device plugin and the arbiter read why a GPU has no pool

Both are of one boot of the node. A status is written anew every `HEARTBEAT_S`, so one that is older than `STALE_S` is of a program that
was killed.
"""

from __future__ import annotations

from typing import Final, TypeVar

import msgspec

from vgpu.api.errors import BadDocument

SHARED_GPUS: Final = "shared-gpus.json"
"""In the device plugin's folder."""
STATUS: Final = "status.json"
"""In the folder of the copiers' sockets."""
VERSION: Final = 1
HEARTBEAT_S: Final = 10.0
"""Between two writes of the status when nothing changed. Guessed."""
STALE_S: Final = 30.0
"""Three heartbeats."""
REPORT_AFTER_S: Final = 120.0
"""A pool may be missing so long before an Event says so, by default. Measured: a pool of 64 GiB is ready after at most 31 s. Twice that, and the start of the pod."""
MIB: Final = 2**20

NO_STATUS: Final = "its pod has not started on this node in this boot"
SILENT: Final = "its program does not run on this node any more, or hangs"
NO_GPUS: Final = "the device plugin has not named the shared GPUs yet"


class SharedGpus(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """GPUs that are not in MIG mode, and which of them have no copier now."""

    v: int = VERSION
    boot_id: str = ""
    gpus: tuple[str, ...] = ()
    """UUIDs, sorted. The pool is divided among them."""
    whole: tuple[str, ...] = ()
    """Of these, the ones that a container has whole: nothing is swapped there."""
    released: bool = False
    """An operator has released NVML, to reset a GPU: no program may have a GPU open."""

    @property
    def served(self) -> tuple[str, ...]:
        """GPUs that have a copier."""
        return () if self.released else tuple(uuid for uuid in self.gpus if uuid not in self.whole)


class PoolGpu(msgspec.Struct, frozen=True):
    """The pool of one GPU. A reader of an earlier version passes over further fields."""

    uuid: str
    ready: bool = False
    """Its copier takes jobs."""
    reason: str = ""
    """Why it is not ready."""
    file: str = ""
    """The pool's file, as the host pool's program sees it. Empty: there is none."""
    file_id: str = ""
    """Device and inode number of that file. Another one is another file, without the earlier content."""
    pages: str = ""
    """What it consists of, such as `huge pages of a tmpfs`; empty until it is ready."""
    pool_bytes: int = 0
    allocated_bytes: int = 0
    registered_bytes: int = 0


class PoolStatus(msgspec.Struct, frozen=True):
    """The pool of a node."""

    v: int = VERSION
    boot_id: str = ""
    written_s: float = 0.0
    """CLOCK_BOOTTIME of the node, seconds."""
    pool_bytes: int = 0
    """As it is set."""
    reason: str = ""
    """Why the node has no pool at all."""
    gpus: tuple[PoolGpu, ...] = ()
    pod_uid: str = ""
    """Of the pod whose copiers use memory of the GPUs without a grant. Empty: not in a pod."""
    left_over: tuple[str, ...] = ()
    """Pool files of GPUs that have no copier. They still take memory."""


Document = TypeVar("Document", SharedGpus, PoolStatus)


def to_text(document: SharedGpus | PoolStatus) -> bytes:
    """The file's content."""
    return msgspec.json.encode(document) + b"\n"


def from_text(kind: type[Document], text: bytes) -> Document:
    """Raises BadDocument, also for another version."""
    try:
        found = msgspec.json.decode(text, type=kind)
    except (msgspec.MsgspecError, UnicodeError) as error:
        raise BadDocument(f"{kind.__name__}: {error}") from None
    if found.v != VERSION:
        raise BadDocument(f"{kind.__name__}: version {found.v}, not {VERSION}")
    return found


def missing_on_node(status: PoolStatus | None, *, boot_id: str, now_s: float) -> str:
    """Why the node has no host pool; empty when it has one. `now_s`: CLOCK_BOOTTIME. None = there is no status."""
    if status is None or status.boot_id != boot_id:
        return NO_STATUS
    if now_s - status.written_s > STALE_S:
        return SILENT
    if status.reason:
        return status.reason
    return "; ".join(f"{gpu.uuid}: {gpu.reason or 'not ready'}" for gpu in status.gpus if not gpu.ready)


def missing_on_gpu(status: PoolStatus | None, uuid: str, *, boot_id: str, now_s: float) -> str:
    """Why one GPU has no host pool; empty when it has one."""
    if status is not None and status.boot_id == boot_id and now_s - status.written_s <= STALE_S and not status.reason:
        gpu = next((one for one in status.gpus if one.uuid == uuid), None)
        if gpu is not None:
            return "" if gpu.ready else gpu.reason or "its copier is not ready"
        return "no copier serves this GPU: it is in MIG mode, given whole, or released"
    return missing_on_node(status, boot_id=boot_id, now_s=now_s)

"""Handles of GPUs by UUID or index, where some GPUs must not be opened.

NVML opens a GPU's device file when its handle is first requested, and may open others while it searches for a UUID. A GPU that is to be reset must not be
open. So where a child may open only some GPUs, it requests each by its PCI address, and none by UUID or index. The table belongs to the process, as NVML's
session does.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from nvml.binding import nv

_allowed: list[str] | None = None
"""PCI addresses in the order of the bus; None = every GPU may be opened."""
_address: dict[str, str] = {}
"""UUID -> PCI address, of those."""


def restrict(addresses: Sequence[str] | None) -> None:
    """Open no other GPU than these, by PCI address; None = any. Opens them."""
    global _allowed
    _allowed = None if addresses is None else list(addresses)
    _address.clear()
    for index in range(count()):
        with suppress(nv.NVMLError):  # a call about a lost one fails later, with the reason
            of_index(index)


def count() -> int:
    """Of GPUs that may be opened."""
    return int(nv.nvmlDeviceGetCount()) if _allowed is None else len(_allowed)


def of_index(index: int) -> Any:
    """The handle of one of these, 0 to `count` - 1."""
    if _allowed is None:
        return nv.nvmlDeviceGetHandleByIndex(index)
    if not 0 <= index < len(_allowed):
        raise nv.NVMLError(nv.NVML_ERROR_INVALID_ARGUMENT)
    handle = nv.nvmlDeviceGetHandleByPciBusId(_allowed[index])
    _address[str(nv.nvmlDeviceGetUUID(handle))] = _allowed[index]
    return handle


def number(handle: Any, index: int) -> int:
    """NVML's own index of the GPU that `of_index(index)` is."""
    return index if _allowed is None else int(nv.nvmlDeviceGetIndex(handle))


def of_uuid(uuid: str) -> Any:
    """The handle of a GPU or MIG instance. One that may not be opened is not found."""
    if _allowed is None or uuid.startswith("MIG-"):  # a MIG instance in use is on a GPU that is open
        return nv.nvmlDeviceGetHandleByUUID(uuid)
    if uuid not in _address:
        raise nv.NVMLError(nv.NVML_ERROR_NOT_FOUND)
    return nv.nvmlDeviceGetHandleByPciBusId(_address[uuid])

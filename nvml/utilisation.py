"""Which processes keep a GPU's multiprocessors busy, as the driver counts it. Reads, and decides nothing."""

from __future__ import annotations

from contextlib import suppress
from typing import Any, Final

from nvml.binding import nv
from nvml.messages import WHOLE, Busy
from nvml.naming import naming

TRIES: Final = 3
"""Guessed."""


def busy(uuid: str, since_us: int, until_us: int) -> Busy:
    """Who computed on a GPU after `since_us`, 0 = in all that the driver remembers. Raises NvmlError.

    Samples of after `until_us` are of a clock that was set back, and left out. Nobody, where the driver does not tell it by process,
    as for a GPU in MIG mode.
    """
    with naming(f"utilisation of GPU {uuid}"):
        handle = nv.nvmlDeviceGetHandleByUUID(uuid)
        try:
            samples = _samples(handle, since_us)
        except nv.NVMLError_NotFound:
            return Busy({}, since_us)
        except nv.NVMLError_NotSupported:
            return Busy({}, since_us, by_process=False)
    fresh = [sample for sample in samples if since_us < sample.timeStamp <= until_us]
    percent = {int(s.pid): int(s.smUtil) for s in fresh if 0 < s.smUtil <= WHOLE}
    return Busy(percent, max((int(sample.timeStamp) for sample in fresh), default=since_us))


def _samples(handle: Any, since_us: int) -> Any:
    """The binding asks how many there are and then for so many; there may be more by then."""
    for _ in range(TRIES - 1):
        with suppress(nv.NVMLError_InsufficientSize):
            return nv.nvmlDeviceGetProcessUtilization(handle, since_us)
    return nv.nvmlDeviceGetProcessUtilization(handle, since_us)

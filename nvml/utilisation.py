"""Which processes keep a card's multiprocessors busy, as the driver counts it. Reads, and decides nothing."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

from nvml.binding import nv
from nvml.errors import naming

WHOLE: Final = 100
"""Percent. The driver was seen to answer numbers far beyond it for processes it has lost sight of; those are left out."""

TRIES: Final = 3
"""Guessed."""


@dataclass(frozen=True, slots=True)
class Busy:
    """One look at a card."""

    percent: Mapping[int, int]
    """Host pid -> percent of the time since the last look in which the process computed. Who did not is left out."""
    seen_us: int
    """Of the driver's latest sample, by its own clock: for the next look. 0 = there never was one."""
    by_process: bool = True
    """Does the driver count by process there? If not, nobody in `percent` says nothing."""


def busy(uuid: str, since_us: int, until_us: int) -> Busy:
    """Who computed on a card after `since_us`, 0 = in all that the driver remembers. Raises NvmlError.

    Samples of after `until_us` are of a clock that was set back, and left out. Nobody, where the driver does not tell it by process,
    as for a card in MIG mode.
    """
    with naming(f"utilisation of card {uuid}"):
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

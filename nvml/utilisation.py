"""Which processes keep a card's multiprocessors busy, as the driver counts it. Reads, and decides nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from nvml.binding import nv
from nvml.errors import naming

WHOLE: Final = 100
"""Percent. The driver was seen to answer numbers far beyond it for processes it has lost sight of; those are left out."""


@dataclass(frozen=True, slots=True)
class Busy:
    """One look at a card."""

    percent: Mapping[int, int]
    """Host pid -> percent of the time since the last look in which the process computed. Who did not is left out."""
    seen_us: int
    """Of the driver's latest sample, by its own clock: for the next look. 0 = there never was one."""


def busy(uuid: str, since_us: int) -> Busy:
    """Who computed on a card after `since_us`, 0 = in all that the driver remembers. Raises NvmlError.

    Nobody, where the driver does not tell it by process, as for a card in MIG mode.
    """
    with naming(f"utilisation of card {uuid}"):
        handle = nv.nvmlDeviceGetHandleByUUID(uuid)
        try:
            samples = nv.nvmlDeviceGetProcessUtilization(handle, since_us)
        except (nv.NVMLError_NotFound, nv.NVMLError_NotSupported):
            return Busy({}, since_us)
    fresh = [sample for sample in samples if sample.timeStamp > since_us]
    percent = {int(s.pid): int(s.smUtil) for s in fresh if 0 < s.smUtil <= WHOLE}
    return Busy(percent, max((int(sample.timeStamp) for sample in fresh), default=since_us))

"""nvshare's published pairs of jobs, to compare with: two copies of one program on one GPU that cannot have both.

Source: the project's own evaluation, table 12.2 of the thesis in its repository (github.com/grgalex/nvshare, grgalex-thesis.pdf, 2021): a Tesla P100 with 16 GB,
seconds until both copies have ended. The programs there alternate work on the GPU with work on the processor; their names have the GPU's part of the
time, and `big` has 15.3 GB, `small` 7.2 GB.

    our part    sizes as published, on a GPU on which the ballast leaves 16 GB and both guarantees. Times are scaled: alone a program takes SOLO_S instead of 692 to 1,383 s, in
                PHASES phases, since the thesis does not have the lengths of the phases. So ratios may be compared, times may not
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

GPU_BYTES: Final = 16 * 10**9
SOLO_S: Final = 60.0
"""Guessed: long enough for several quanta, short enough for three repeats."""
PHASES: Final = 10


@dataclass(frozen=True, slots=True)
class Program:
    """One of the four. Times are the published seconds."""

    name: str
    total_bytes: int
    gpu_part: float
    """Of its time alone."""
    solo_s: int
    serial_s: int
    unscheduled_s: int
    """Two at once in unified memory, in the driver's order."""
    by_quantum_s: dict[int, int]
    """Two at once with their scheduler, by the length of its quantum in seconds."""

    @property
    def ratios(self) -> dict[str, float]:
        """Two at once against one after the other."""
        quanta = {f"quantum {quantum} s": took / self.serial_s for quantum, took in self.by_quantum_s.items()}
        return {"unified memory": self.unscheduled_s / self.serial_s} | quanta


PROGRAMS: Final = (
    Program("small_50", 7_200_000_000, 0.5, 1318, 2636, 1772, {1000: 2053, 60: 2020, 30: 2017, 10: 2009}),
    Program("small_90", 7_200_000_000, 0.9, 692, 1384, 1128, {1000: 1361, 60: 1348, 30: 1366, 10: 1360}),
    Program("big_50", 15_300_000_000, 0.5, 1383, 2766, 11757, {1000: 2043, 60: 2122, 30: 2170, 10: 2465}),
    Program("big_90", 15_300_000_000, 0.9, 719, 1438, 11434, {1000: 1380, 60: 1468, 30: 1521, 10: 1821}),
)

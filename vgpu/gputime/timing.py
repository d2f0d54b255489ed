"""The settings of the GPU-time scheduler (`vgpu.gputime.scheduler`): frames, time slices and graces; and the precision of its times."""

from __future__ import annotations

from dataclasses import dataclass
from math import ulp
from typing import Final

LITTLE_S: Final = 1e-9
"""A shorter remaining time is a rounding error, on a clock of any age."""


def little_s(at_s: float) -> float:
    """A shorter remaining time is a rounding error, on a clock that shows `at_s`.

    A double of a few months has steps of nanoseconds, and one of ten years steps of 60: `at_s + left_s` may be a step early. A scheduler that treated
    the rest of a step as remaining time would decide again at once, for ever, or never.
    """
    return max(LITTLE_S, 2 * ulp(at_s))


def time_left_s(before_s: float, passed_s: float, little_s: float) -> float:
    """The remaining time; a rounding error counts as 0."""
    return before_s - passed_s if before_s - passed_s > little_s else 0.0


@dataclass(frozen=True, slots=True)
class Timing:
    """The policy's settings. The defaults suit kernels and requests of milliseconds."""

    frame_s: float = 0.050
    """One round of time slices, and the unit of credit. Measured: 20, 50 and 100 ms are equally exact, and 50 costs few switches."""
    frames_kept: float = 3.0
    """Credit that can be saved up, in frames. Specified by the design."""
    quantum_least_s: float = 0.005
    """The shortest time slice, however small the weight. Guessed: ten times the cost of a switch."""
    grace_s: float = 200e-6
    """How long after its last work a latency-critical container keeps the GPU. Measured: suits requests with one synchronise."""
    starve_after_s: float = 1.0
    """How long a container with work and credit waits at most. Guessed."""
    starve_slice_s: float = 0.020
    """The slice that it gets then. Guessed."""
    lead_s: float = 0.0015
    """How long before an announced request the GPU is cleared. Measured: then the request runs as if alone."""
    hint_hold_s: float = 0.005
    """How long an announced request that does not arrive keeps the GPU. Guessed."""
    section_s: float = 1.0
    """How long an announced section may last without an end. Specified: the effect of a missing end is bounded."""
    suspend_s: float = 0.0007
    """Expected time of a suspend before one was measured. Measured on an H200."""

"""How the policy of GPU time (`vgpu.gputime.scheduler`) behaves: its frames, time slices and graces. And how exact its times are."""

from __future__ import annotations

from dataclasses import dataclass
from math import ulp
from typing import Final

LITTLE_S: Final = 1e-9
"""A time left that is shorter is rounding, on a clock of any age."""


def little_s(at_s: float) -> float:
    """A time left that is shorter is rounding, on a clock that shows `at_s`.

    A double of a few months has steps of nanoseconds, and one of ten years steps of 60: `at_s + left_s` may be a step early. Who took the
    rest of a step for time that is left would decide again at once, for ever, or never.
    """
    return max(LITTLE_S, 2 * ulp(at_s))


@dataclass(frozen=True, slots=True)
class Settings:
    """How the policy behaves. The defaults are for kernels and requests of milliseconds."""

    frame_s: float = 0.050
    """One round of time slices, and the unit of credit. Measured: 20, 50 and 100 ms are equally exact, and 50 costs few switches."""
    frames_kept: float = 3.0
    """Credit that can be saved up, in frames. Specified by the design."""
    quantum_least_s: float = 0.005
    """No time slice is shorter, however small the weight. Guessed: ten times the cost of a switch."""
    grace_s: float = 200e-6
    """How long after its last work a latency-critical container keeps the GPU. Measured: suits requests with one synchronise."""
    starve_after_s: float = 1.0
    """How long anybody with work and credit waits at most. Guessed."""
    starve_slice_s: float = 0.020
    """What it then gets. Guessed."""
    lead_s: float = 0.0015
    """How long before an announced request the GPU is cleared. Measured: then the request runs as if alone."""
    hint_hold_s: float = 0.005
    """How long an announced request that does not come keeps the GPU. Guessed."""
    section_s: float = 1.0
    """How long an announced section may last without an end. Specified: what a container forgets is bounded."""
    suspend_s: float = 0.0007
    """Expected time of a suspend before one was measured. Measured on an H200."""

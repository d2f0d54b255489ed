"""The settings of the swap policy (`vgpu.memory.swap.policy`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class SwapSettings:
    """The defaults suit models of gigabytes over PCIe 5."""

    swap_part: float = 0.05
    """The most of a quantum that swapping may cost. Specified."""
    quantum_least_s: float = 2.0
    """The shortest quantum, however little moves. Guessed: a user notices no pause below it less than its neighbours' work."""
    bytes_per_s: float = 50e9
    """Expected speed one way, before one was measured. Measured on an H200: 47 to 51 GiB/s."""
    bytes_per_s_least: float = 1e9
    """No slower speed is expected, so that one bad measurement makes no quantum of hours; a container that moves its memory out at
    this speed gives way. Guessed: a tenth of PCIe 3 x16."""
    overhead_s: float = 0.1
    """What a change of places takes beside copying. Specified: 16 GB change places within 0.45 s, of which 0.33 are copying."""
    starve_after_s: float = 600.0
    """A container that has waited so long for its turn gets one quantum before all others, also before more urgent ones. Guessed: less urgent work
    shows progress every ten minutes, and a latency-critical container is kept out for at most some seconds in that time."""
    announced_hold_s: float = 1.0
    """How long announced work that does not come counts as work. Guessed."""
    reclaim_timeout_s: float = 10.0
    """How long a container may take to give way. Specified: `burst.reclaimTimeout`."""
    stranded_after_s: float = 300.0
    """After which a container whose memory cannot come back is stranded. Specified: `burst.strandedAfter`."""
    retry_s: float = 5.0
    """How long an order that failed is not repeated. Guessed."""
    able_within_s: float = 1.0
    """How long a request above the guarantee waits, also if it may not wait, for the container's processes to state that they can be swapped. Guessed: they do within
    a moment after their connection."""
    pool_full: Literal["refuse", "delay"] = "delay"
    """What happens to a request above the guarantee while the host pool has no room for it."""

"""The arbiter, with quanta that suit the small memory of these tests: its own are of two seconds and more."""

from __future__ import annotations

import functools

import arbiter.__main__ as program
from vgpu.memory.swap.settings import SwapSettings

program.SwapSettings = functools.partial(  # type: ignore[assignment,misc]
    SwapSettings, quantum_least_s=0.1, overhead_s=0.005, swap_part=0.5, retry_s=0.2
)
program.main()

"""NVML, opened and closed. One process opens it once; opening again after an error is allowed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from nvml.binding import nv
from nvml.library import load
from nvml.messages import Found
from nvml.naming import naming


@contextmanager
def opened(driver_root: Path) -> Iterator[Found]:
    """NVML is usable inside. Answers where the library was found. Raises NvmlError."""
    found = load(driver_root)
    with naming(f"the NVIDIA driver of {driver_root}"):
        nv.nvmlInit()
    try:
        yield found
    finally:
        with suppress(nv.NVMLError):
            nv.nvmlShutdown()

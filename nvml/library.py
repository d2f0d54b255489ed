"""Find NVIDIA's management library under a driver root and load it, so that pynvml finds it loaded already.

pynvml loads `libnvidia-ml.so.1`; glibc takes a library that has that SONAME and is loaded already, wherever it came
from. Decides where to search; independent of GPUs.
"""

from __future__ import annotations

import ctypes
from pathlib import Path

from nvml.driver_root import LIBRARY, locate
from nvml.errors import NvmlError
from nvml.messages import Found
from vgpu.api.driver_places import PLACES


def library_folder(driver_root: Path) -> Path | None:
    """The folder under `driver_root` with the management library, or None."""
    place = locate(driver_root)
    return place.libraries if place else None


def load(driver_root: Path) -> Found:
    """Load the management library from `driver_root`, else from where the loader finds one.

    Raises NvmlError, which names the places searched.
    """
    place = locate(driver_root)
    path = str(place.library) if place else LIBRARY
    try:
        ctypes.CDLL(path, mode=ctypes.RTLD_GLOBAL)
    except OSError as error:
        if place:
            raise NvmlError(f"{path} cannot be loaded: {error} ({place.text})") from None
        looked = ", ".join(str(driver_root / one.root / folder) for one in PLACES for folder in one.libraries)
        raise NvmlError(
            f"no {LIBRARY} in {looked}, and the loader knows none: is the NVIDIA driver installed?"
        ) from None
    return "driver root" if place else "loader"

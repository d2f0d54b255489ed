"""Find NVIDIA's management library under a driver root and load it, so that pynvml finds it loaded already.

pynvml loads `libnvidia-ml.so.1`; glibc takes a library that has that SONAME and is loaded already, wherever it came
from. Decides where to search; independent of GPUs.
"""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Final

from nvml.errors import NvmlError
from nvml.messages import Found

LIBRARY: Final = "libnvidia-ml.so.1"

LIBRARY_FOLDERS: Final = (
    "lib", "lib64", "usr/lib/x86_64-linux-gnu", "usr/lib/aarch64-linux-gnu", "usr/lib64", "usr/lib",
)  # fmt: skip
"""Where driver installers put the libraries, relative to a driver root: NVIDIA's container, Debian, Red Hat."""


def library_folder(driver_root: Path) -> Path | None:
    """The folder under `driver_root` with the management library, or None."""
    folders = (driver_root / folder for folder in LIBRARY_FOLDERS)
    return next((folder for folder in folders if (folder / LIBRARY).exists()), None)


def load(driver_root: Path) -> Found:
    """Load the management library from `driver_root`, else from where the loader finds one.

    Raises NvmlError, which names the places searched.
    """
    folder = library_folder(driver_root)
    path = str(folder / LIBRARY) if folder else LIBRARY
    try:
        ctypes.CDLL(path, mode=ctypes.RTLD_GLOBAL)
    except OSError as error:
        if folder:
            raise NvmlError(f"{path} cannot be loaded: {error}") from None
        looked = ", ".join(str(driver_root / name) for name in LIBRARY_FOLDERS)
        raise NvmlError(
            f"no {LIBRARY} in {looked}, and the loader knows none: is the NVIDIA driver installed?"
        ) from None
    return "driver root" if folder else "loader"

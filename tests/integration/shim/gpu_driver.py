"""The driver as programs of gpu.py call it: by the exported names of the C headers."""

from __future__ import annotations

import ctypes

MIB = 2**20
cuda = ctypes.CDLL("libcuda.so.1")

"""What goes wrong when speaking to the NVIDIA driver.

TangramError
└── NvmlError        the driver is not there, refused, or is too old; names the GPU and NVML's own words
    ├── NvmlHalf     the driver refused half way, and what was done could not be undone: a part of a MIG instance is there
    ├── NvmlHung     a call did not return in time, or would meet a GPU of which one did not
    └── NvmlAway     no child answers now: it was ended, or none may be started; gives the reason
        └── NvmlOpening   the first child has not opened NVML yet

Independent of NVML itself, so that every program may import it.
"""

from __future__ import annotations

from vgpu.api.errors import TangramError


class NvmlError(TangramError):
    """The driver is not there, refused, or is too old. `code` is NVML's number, 0 when NVML was never reached."""

    def __init__(self, text: str, code: int = 0) -> None:
        super().__init__(text)
        self.code = code


class NvmlHalf(NvmlError):
    """The driver refused half way, and what was done could not be undone: a part of a MIG instance is there."""


class NvmlHung(NvmlError):
    """A call did not return in time. Of other GPUs nothing is known by that."""


class NvmlAway(NvmlError):
    """No child answers now."""


class NvmlOpening(NvmlAway):
    """The first child has not opened NVML yet."""

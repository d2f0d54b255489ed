"""What goes wrong when speaking to the NVIDIA driver.

TangramError
└── NvmlError       the driver is not there, or refused; names the card and NVML's own words
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from nvml.binding import nv
from vgpu.errors import TangramError


class NvmlError(TangramError):
    """The driver is not there or refused. `code` is NVML's number, 0 when NVML was never reached."""

    def __init__(self, text: str, code: int = 0) -> None:
        super().__init__(text)
        self.code = code


@contextmanager
def naming(what: str) -> Iterator[None]:
    """Errors of NVML inside become NvmlError and say what they were about."""
    try:
        yield
    except nv.NVMLError as error:
        code = int(getattr(error, "value", 0))
        raise NvmlError(f"{what}: NVML says {error} ({code})", code) from None

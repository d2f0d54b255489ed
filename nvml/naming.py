"""NVML's own errors as ours. Belongs to the child: it imports the binding."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from nvml.binding import nv
from nvml.errors import NvmlError
from vgpu.api.driver import too_old


@contextmanager
def naming(what: str) -> Iterator[None]:
    """Errors of NVML inside become NvmlError and name their object. A missing function names the oldest supported driver."""
    try:
        yield
    except (
        nv.NVMLError_FunctionNotFound,
        nv.NVMLLibraryMismatchError,
    ):  # the second is no NVMLError: lists of processes raise it
        raise NvmlError(f"{what}: {too_old(_driver_version())}", int(nv.NVML_ERROR_FUNCTION_NOT_FOUND)) from None
    except nv.NVMLError as error:
        code = int(getattr(error, "value", 0))
        raise NvmlError(f"{what}: NVML reports {error} ({code})", code) from None


def _driver_version() -> str:
    """Empty where NVML does not report it, as before it is initialised."""
    try:
        return str(nv.nvmlSystemGetDriverVersion())
    except nv.NVMLError:
        return ""

"""What the sensors and counters of one GPU show. States facts and decides nothing.

A value that this GPU or driver does not report is None. That the GPU does not answer at all is an error that names it.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final, TypeVar

from nvml import handles, links
from nvml.binding import nv
from nvml.errors import NvmlError
from nvml.messages import HealthReply
from nvml.naming import naming
from vgpu.health.conditions import GPU_IS_LOST, Reading

HEADROOM_C: Final = range(-100, 200)
"""What is outside these is no difference of two temperatures: an answer of a driver that does not know better."""

T = TypeVar("T")


def health(uuid: str) -> HealthReply:
    """Does the GPU answer, and what do its sensors show?"""
    try:
        with naming(f"GPU {uuid}"):
            handle = handles.of_uuid(uuid)
            with suppress(nv.NVMLError_NotSupported):  # it answers, and has no memory of its own
                nv.nvmlDeviceGetMemoryInfo(handle)
            return HealthReply(None, reading(handle))
    except NvmlError as error:
        return HealthReply(str(error), code=error.code)


def reading(handle: Any) -> Reading:
    """Raises the binding's error where the GPU is lost."""
    corrected, uncorrected, pending, failed = _optional(lambda: nv.nvmlDeviceGetRemappedRows(handle)) or [None] * 4
    temperature_c = _optional(lambda: int(nv.nvmlDeviceGetTemperature(handle, nv.NVML_TEMPERATURE_GPU)))
    states = links.states(handle)
    replays, recoveries, crc_errors = links.errors(handle, len(states))
    return Reading(
        temperature_c=temperature_c,
        power_mw=_optional(lambda: int(nv.nvmlDeviceGetPowerUsage(handle))),
        power_limit_mw=_optional(lambda: int(nv.nvmlDeviceGetEnforcedPowerLimit(handle))),
        headroom_c=_headroom_c(handle, temperature_c),
        sm_clock_mhz=_optional(lambda: int(nv.nvmlDeviceGetClockInfo(handle, nv.NVML_CLOCK_SM))),
        sm_clock_max_mhz=_optional(lambda: int(nv.nvmlDeviceGetMaxClockInfo(handle, nv.NVML_CLOCK_SM))),
        slowdowns=_optional(lambda: int(nv.nvmlDeviceGetCurrentClocksThrottleReasons(handle))),
        ecc_corrected=_ecc(handle, nv.NVML_MEMORY_ERROR_TYPE_CORRECTED),
        ecc_uncorrected=_ecc(handle, nv.NVML_MEMORY_ERROR_TYPE_UNCORRECTED),
        rows_corrected=corrected,
        rows_uncorrected=uncorrected,
        rows_pending=None if pending is None else bool(pending),
        rows_failed=None if failed is None else bool(failed),
        pcie_replays=_optional(lambda: int(nv.nvmlDeviceGetPcieReplayCounter(handle))),
        links_up=sum(states) if states else None,
        link_replays=replays,
        link_recoveries=recoveries,
        link_crc_errors=crc_errors,
        recovery_action=_recovery_action(handle),
    )


def _ecc(handle: Any, kind: int) -> int | None:
    return _optional(lambda: int(nv.nvmlDeviceGetTotalEccErrors(handle, kind, nv.NVML_VOLATILE_ECC)))


def _headroom_c(handle: Any, temperature_c: int | None) -> int | None:
    """Degrees left. From the margin that GPUs since Ada report (T.Limit; as `nvidia-smi -q` on an H200, tests/gpu/results/estate.csv), else from the slowdown temperature, which was
    compared with no GPU."""
    margin_of = getattr(nv, "nvmlDeviceGetMarginTemperature", None)
    margin_c = _optional(lambda: int(margin_of(handle))) if margin_of is not None else None
    at_c = _signed_field(handle, "NVML_FI_DEV_TEMPERATURE_SLOWDOWN_TLIMIT") if margin_c is not None else None
    if margin_c is not None and at_c is not None:
        left_c = margin_c - at_c
    else:
        slowdown_c = _optional(
            lambda: int(nv.nvmlDeviceGetTemperatureThreshold(handle, nv.NVML_TEMPERATURE_THRESHOLD_SLOWDOWN))
        )
        if not slowdown_c or temperature_c is None:
            return None
        left_c = slowdown_c - temperature_c
    return left_c if left_c in HEADROOM_C else None


def _signed_field(handle: Any, name: str) -> int | None:
    field = getattr(nv, name, None)
    values = _optional(lambda: nv.nvmlDeviceGetFieldValues(handle, [field])) if field is not None else None
    if not values or values[0].nvmlReturn != nv.NVML_SUCCESS:
        return None
    return int(values[0].value.siVal)


def _recovery_action(handle: Any) -> int:
    """The driver's own word on what the GPU needs (0 = nothing), from R565 on; 0 where it has none."""
    field = getattr(nv, "NVML_FI_DEV_GET_GPU_RECOVERY_ACTION", None)
    if field is None:
        return 0
    values = _optional(lambda: nv.nvmlDeviceGetFieldValues(handle, [field]))
    return int(values[0].value.uiVal) if values and values[0].nvmlReturn == nv.NVML_SUCCESS else 0


def _optional(request: Callable[[], T]) -> T | None:
    """What NVML answers, or None when this GPU or driver does not know."""
    try:
        return request()
    except nv.NVMLError as error:
        if getattr(error, "value", 0) == GPU_IS_LOST:
            raise
        return None

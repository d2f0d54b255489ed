"""The NVLinks of one GPU: which are active, and the errors that they counted. States facts and decides nothing.

Both by one call each of nvmlDeviceGetFieldValues, where the driver knows the fields: 18 links are 18 calls otherwise. Every function raises the binding's error
where the GPU is lost. The field numbers are those of nvml.h; which of them a GPU answers was not measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile
from typing import Any, Final

from nvml.binding import nv
from vgpu.health.conditions import GPU_IS_LOST

MOST_LINKS: Final = 18
"""NVML_NVLINK_MAX_LINKS of nvml.h, where the binding has none."""
STATE: Final = "NVML_FI_DEV_NVLINK_GET_STATE"
COUNTERS: Final[tuple[tuple[tuple[str, ...], tuple[str, ...]], ...]] = (
    (("NVML_FI_DEV_NVLINK_ERROR_DL_REPLAY",), ("NVML_FI_DEV_NVLINK_REPLAY_ERROR_COUNT_TOTAL",)),
    (
        ("NVML_FI_DEV_NVLINK_ERROR_DL_RECOVERY", "NVML_FI_DEV_NVLINK_COUNT_LINK_RECOVERY_EVENTS"),
        ("NVML_FI_DEV_NVLINK_RECOVERY_ERROR_COUNT_TOTAL",),
    ),
    (
        ("NVML_FI_DEV_NVLINK_ERROR_DL_CRC",),
        ("NVML_FI_DEV_NVLINK_CRC_FLIT_ERROR_COUNT_TOTAL", "NVML_FI_DEV_NVLINK_CRC_DATA_ERROR_COUNT_TOTAL"),
    ),
)
"""Replays, recoveries, CRC errors: fields of each link, of which a GPU answers one at most (Blackwell counts recoveries by another, and neither of the others), and
fields of all links of older GPUs together."""


def states(handle: Any) -> tuple[bool, ...]:
    """Is it active, or asleep? Of each link that the GPU has; empty: it has none. Raises the binding's error where the GPU is lost."""
    links = range(getattr(nv, "NVML_NVLINK_MAX_LINKS", MOST_LINKS))
    values = _fields(handle, [(STATE, link) for link in links])
    known = tuple(takewhile(lambda value: value is not None, values))
    return tuple(map(bool, known)) if known else tuple(_one_by_one(handle, links))


def errors(handle: Any, links: int) -> tuple[int | None, int | None, int | None]:
    """Replays, recoveries, CRC errors of all links; None = not reported. `links`: how many the GPU has."""
    if not links:
        return None, None, None
    wanted = [
        (name, link)
        for of_each, of_all in COUNTERS
        for names, scopes in ((of_each, range(links)), (of_all, range(1)))
        for name in names
        for link in scopes
    ]
    found: dict[str, int] = {}
    for (name, _), value in zip(wanted, _fields(handle, wanted), strict=True):
        if value is not None:
            found[name] = found.get(name, 0) + value
    replays, recoveries, crc = (_counted(found, *names) for names in COUNTERS)
    return replays, recoveries, crc


def _counted(found: dict[str, int], of_each: Sequence[str], of_all: Sequence[str]) -> int | None:
    for names in (of_each, of_all):
        if known := [found[name] for name in names if name in found]:
            return sum(known)
    return None


def _fields(handle: Any, wanted: Sequence[tuple[str, int]]) -> list[int | None]:
    """(Field, link) -> value; None = the driver or the binding does not know it."""
    numbered = [(getattr(nv, name, None), link) for name, link in wanted]
    known = [(field, link) for field, link in numbered if field is not None]
    try:
        values = iter(nv.nvmlDeviceGetFieldValues(handle, known) if known else ())
    except nv.NVMLError as error:
        _raise_if_lost(error)
        return [None] * len(wanted)
    return [None if field is None else _value(next(values)) for field, _ in numbered]


def _value(field: Any) -> int | None:
    if field.nvmlReturn == GPU_IS_LOST:
        raise nv.NVMLError(GPU_IS_LOST)
    if field.nvmlReturn != nv.NVML_SUCCESS:
        return None
    whole = field.valueType == nv.NVML_VALUE_TYPE_UNSIGNED_INT
    return int(field.value.uiVal if whole else field.value.ullVal)


def _one_by_one(handle: Any, links: range) -> list[bool]:
    found: list[bool] = []
    for link in links:
        try:
            found.append(bool(nv.nvmlDeviceGetNvLinkState(handle, link)))
        except nv.NVMLError as error:
            _raise_if_lost(error)
            break
    return found


def _raise_if_lost(error: Exception) -> None:
    if getattr(error, "value", 0) == GPU_IS_LOST:
        raise error

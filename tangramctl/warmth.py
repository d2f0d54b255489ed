"""What `tangramctl top` says of the GPUs themselves: clock, power, temperature, and containers that slow each other. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final

import msgspec

from tangramctl.view import RunView, StateRootView
from vgpu.protocol.status import SensorStatus

POWER_CAP: Final = "sw_power_cap"
POWER_BRAKE: Final = "hw_power_brake_slowdown"
THERMAL: Final = frozenset({"sw_thermal_slowdown", "hw_thermal_slowdown"})
SLOWING: Final = (POWER_CAP, POWER_BRAKE, *sorted(THERMAL))
"""Of nvidia-smi's reasons, those that the work of the GPU or of its neighbours causes."""


class GpuRow(msgspec.Struct, frozen=True):
    """One GPU. None where it is not reported."""

    uuid: str
    index: int | None
    heat: str
    """Class: cool, normal or hot."""
    sm_clock_mhz: int | None
    sm_clock_max_mhz: int | None
    power_mw: int | None
    power_limit_mw: int | None
    temperature_c: int | None
    headroom_c: int | None
    """Degrees below the temperature at which the GPU reduces its clocks."""
    slowdowns: tuple[str, ...]
    """Why the clocks are reduced, by nvidia-smi's names."""
    computing: int
    """Runs and containers that computed there between the two readings."""

    @property
    def name(self) -> str:
        """As in the table of `ps`."""
        return self.uuid[:12] if self.index is None else str(self.index)


def gpu_rows(now: StateRootView, got: Mapping[str, float | None]) -> tuple[GpuRow, ...]:
    """By index, then UUID. `got`: key of a run or container -> percent of the time in which it ran; those that are left out did not."""
    rows = [_row(one, now.entries, got) for one in now.sensors]
    return tuple(sorted(rows, key=lambda row: (row.index is None, row.index or 0, row.uuid)))


def _row(one: SensorStatus, entries: Sequence[RunView], got: Mapping[str, float | None]) -> GpuRow:
    here = [(entry, gpu) for entry in entries for gpu in entry.gpus if gpu.uuid == one.uuid]
    return GpuRow(
        one.uuid, next((gpu.index for _, gpu in here if gpu.index is not None), None), one.heat, one.sm_clock_mhz, one.sm_clock_max_mhz,
        one.power_mw, one.power_limit_mw, one.temperature_c, one.headroom_c, one.slowdowns,
        sum(1 for entry, _ in here if (got.get(entry.key) or 0.0) > 0),
    )  # fmt: skip


def slowed_notes(rows: Iterable[GpuRow]) -> Iterator[str]:
    """A sentence for each GPU whose clock is reduced by what runs on it, or by its server."""
    for row in rows:
        reasons = set(row.slowdowns)
        clock = "" if row.sm_clock_mhz is None else f" ({clocks(row)})"
        if POWER_BRAKE in reasons:
            yield f"GPU {row.name}: the server's power brake reduces the clock{clock}: the GPUs of this server slow each other"
        if POWER_CAP in reasons and row.computing > 1:
            yield f"GPU {row.name}: its power limit reduces the clock{clock}: its {row.computing} containers slow each other"
        elif POWER_CAP in reasons:
            yield f"GPU {row.name}: its power limit reduces the clock{clock}"
        if THERMAL & reasons:
            yield f"GPU {row.name}: heat reduces the clock{clock}"


def link_notes(rows: Iterable[GpuRow], before: StateRootView, now: StateRootView) -> Iterator[str]:
    """A sentence for each GPU whose NVLinks counted errors between the two readings."""
    had, has = ({one.uuid: one.link_errors for one in view.sensors} for view in (before, now))
    for row in rows:
        more = (has.get(row.uuid) or 0) - (had.get(row.uuid) or 0)
        if more > 0 and had.get(row.uuid) is not None:
            yield f"GPU {row.name}: its NVLinks counted {more} errors meanwhile"


def clocks(row: GpuRow) -> str:
    """`1599 of 1980 MHz`; `?` where unknown."""
    if row.sm_clock_mhz is None:
        return "?"
    return (
        f"{row.sm_clock_mhz} MHz" if not row.sm_clock_max_mhz else f"{row.sm_clock_mhz} of {row.sm_clock_max_mhz} MHz"
    )


def watts(row: GpuRow) -> str:
    """`690 of 700 W`; `?` where unknown."""
    if row.power_mw is None:
        return "?"
    used = f"{row.power_mw / 1000:.0f}"
    return f"{used} W" if not row.power_limit_mw else f"{used} of {row.power_limit_mw / 1000:.0f} W"


def degrees(row: GpuRow) -> str:
    """`61 C`; `?` where unknown."""
    return "?" if row.temperature_c is None else f"{row.temperature_c} C"


def slowed_by(row: GpuRow) -> str:
    """The reasons that work causes; `-` without any."""
    return ", ".join(reason for reason in SLOWING if reason in row.slowdowns) or "-"

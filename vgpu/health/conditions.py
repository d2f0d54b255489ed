"""How well a GPU is: conditions, each with a reason and the time since when, from what the driver reports. Pure.

    healthy       no condition stands
    degraded      works, slower or with less reserve than it should: pods may have it
    unhealthy     not fit for use: new pods do not get it
    unmonitored   NVML does not answer, so nothing is known: new pods do not get it, as their limits could not be enforced

A condition of the GPU itself ends when the GPU has answered well `ANSWERS_TO_RECOVER` times in a row. `RowRemapPending`
ends as soon as no row waits. A sensor's condition ends when the sensor has been
normal for `CALM_S`, so that a value on the edge does not write an annotation every few seconds. No GPU stays unhealthy for good.

Times are seconds since 1970.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Final

from vgpu.api.inventory import GpuCondition, HealthState
from vgpu.health.link_errors import Beginning, Counts, beginning, grown

APPLICATION_XIDS: Final = frozenset({13, 31, 43, 45, 68, 109})
"""XIDs that a program's own mistakes raise: they show nothing about the GPU. As in NVIDIA's device plugin."""
OFF_THE_BUS_XID: Final = 79

ANSWERS_TO_RECOVER: Final = 2
"""Pulled out of the air: one answer may be luck in the middle of a reset."""
CALM_S: Final = 60.0
"""Guessed: longer than a GPU takes to cool down between two bursts of work."""

GPU_IS_LOST: Final = 15
"""NVML_ERROR_GPU_IS_LOST: NVML's own word for a GPU that fell off the bus. From nvml.h."""


class Reason(StrEnum):
    """Why a GPU is not healthy, as inventories, Events and metrics call it."""

    OFF_THE_BUS = "OffTheBus"
    NOT_ANSWERING = "NotAnswering"
    HUNG = "CallHangs"
    XID = "XidError"
    RECOVERY = "RecoveryNeeded"
    REMAP_FAILED = "RowRemapFailed"
    SELF_TEST = "SelfTestFailed"
    UNMONITORED = "NvmlAway"
    REMAP_PENDING = "RowRemapPending"
    ECC = "UncorrectableEcc"
    NVLINK = "NvlinkDown"
    NVLINK_ERRORS = "NvlinkErrors"
    THERMAL = "ThermalSlowdown"
    POWER_BRAKE = "PowerBrake"


STATES: Final[dict[Reason, HealthState]] = {
    Reason.OFF_THE_BUS: "unhealthy",
    Reason.NOT_ANSWERING: "unhealthy",
    Reason.HUNG: "unhealthy",
    Reason.XID: "unhealthy",
    Reason.RECOVERY: "unhealthy",
    Reason.REMAP_FAILED: "unhealthy",
    Reason.SELF_TEST: "unhealthy",
    Reason.UNMONITORED: "unmonitored",
    Reason.REMAP_PENDING: "degraded",
    Reason.ECC: "degraded",
    Reason.NVLINK: "degraded",
    Reason.NVLINK_ERRORS: "degraded",
    Reason.THERMAL: "degraded",
    Reason.POWER_BRAKE: "degraded",
}

SENSORS: Final = frozenset({Reason.ECC, Reason.NVLINK, Reason.NVLINK_ERRORS, Reason.THERMAL, Reason.POWER_BRAKE})
"""Conditions that end when a value has been normal for a while. The rest ends with good answers."""

SLOWDOWNS: Final = {
    0x01: "gpu_idle",
    0x02: "applications_clocks_setting",
    0x04: "sw_power_cap",
    0x08: "hw_slowdown",
    0x10: "sync_boost",
    0x20: "sw_thermal_slowdown",
    0x40: "hw_thermal_slowdown",
    0x80: "hw_power_brake_slowdown",
    0x100: "display_clock_setting",
}
"""nvmlClocksEventReasons, from nvml.h; the names as nvidia-smi has them."""
THERMAL_BITS: Final = 0x20 | 0x40
POWER_BRAKE_BIT: Final = 0x80


@dataclass(frozen=True, slots=True)
class Reading:
    """What the sensors and counters of a GPU show. None = this GPU or driver does not report it."""

    temperature_c: int | None = None
    power_mw: int | None = None
    power_limit_mw: int | None = None
    headroom_c: int | None = None
    """Degrees below the temperature at which the GPU reduces its clocks; below 0 it is hotter."""
    sm_clock_mhz: int | None = None
    sm_clock_max_mhz: int | None = None
    """The highest that the GPU may reach."""
    slowdowns: int | None = None
    """Bits of `SLOWDOWNS`."""
    ecc_corrected: int | None = None
    """Since the driver was loaded."""
    ecc_uncorrected: int | None = None
    rows_corrected: int | None = None
    rows_uncorrected: int | None = None
    rows_pending: bool | None = None
    """A row is remapped at the next reset."""
    rows_failed: bool | None = None
    """A row could not be remapped."""
    pcie_replays: int | None = None
    links_up: int | None = None
    """NVLinks that are active; None = the GPU has none."""
    link_replays: int | None = None
    """Of all NVLinks of the GPU, since the driver was loaded: packets that were sent again."""
    link_recoveries: int | None = None
    """Links that broke and were set up again."""
    link_crc_errors: int | None = None
    recovery_action: int = 0
    """nvmlDeviceGpuRecoveryAction: what the driver requests; 0 = nothing."""

    @property
    def link_errors(self) -> Counts:
        """Replays, recoveries, CRC errors."""
        return self.link_replays, self.link_recoveries, self.link_crc_errors


@dataclass(frozen=True, slots=True)
class GpuHealth:
    """Of one GPU, with what it takes to go on from here."""

    standing: dict[Reason, GpuCondition] = field(default_factory=dict)
    seen_s: dict[Reason, float] = field(default_factory=dict)
    """When a sensor last showed its condition."""
    answers: int = 0
    """Good ones in a row."""
    most_links: int = 0
    """NVLinks that were ever up at once."""
    ecc_before: int | None = None
    """Uncorrectable errors at the first reading: they are another boot's, or another pod's."""
    links_since: Beginning | None = None
    """The reading from which errors of NVLinks are counted."""

    @property
    def conditions(self) -> tuple[GpuCondition, ...]:
        """The worst first."""
        return tuple(self.standing[reason] for reason in Reason if reason in self.standing)


def after_xid(health: GpuHealth, xid: int, at_s: float) -> GpuHealth:
    """The driver reported an XID."""
    if xid in APPLICATION_XIDS:
        return health
    reason = Reason.OFF_THE_BUS if xid == OFF_THE_BUS_XID else Reason.XID
    return replace(_with(health, reason, f"the driver reported XID {xid}", at_s), answers=0)


def after_failure(health: GpuHealth, why: str, at_s: float, *, code: int = 0, hung: bool = False) -> GpuHealth:
    """A query of the GPU failed with NVML's `code`, or did not return."""
    reason = Reason.HUNG if hung else Reason.OFF_THE_BUS if code == GPU_IS_LOST else Reason.NOT_ANSWERING
    return replace(_with(without(health, (Reason.UNMONITORED,)), reason, why, at_s), answers=0)


def after_away(health: GpuHealth, why: str, at_s: float) -> GpuHealth:
    """NVML has not answered for a while. That says nothing about the GPU: what stands goes on to stand."""
    return replace(_with(health, Reason.UNMONITORED, why, at_s), answers=0)


def after_self_test(health: GpuHealth, why: str, at_s: float) -> GpuHealth:
    """The GPU was tried. `why` it does not work; empty: it does."""
    before = without(health, (Reason.SELF_TEST,))
    return _with(before, Reason.SELF_TEST, why, at_s) if why else before


def since_before(health: GpuHealth, earlier_s: Mapping[Reason, int]) -> GpuHealth:
    """Conditions that stood when this program ended and stand again began when they did then."""
    standing = {
        reason: replace(one, since_s=min(one.since_s, earlier_s.get(reason, one.since_s)))
        for reason, one in health.standing.items()
    }
    return replace(health, standing=standing)


def after_reading(health: GpuHealth, reading: Reading, at_s: float) -> GpuHealth:
    """The GPU was queried and answered."""
    most_links = max(health.most_links, reading.links_up or 0)
    ecc_before = reading.ecc_uncorrected if health.ecc_before is None else health.ecc_before
    if ecc_before is not None and reading.ecc_uncorrected is not None:
        ecc_before = min(ecc_before, reading.ecc_uncorrected)  # a reset of the GPU clears the counter
    links_since = beginning(health.links_since, reading.link_errors, at_s)
    now = replace(
        without(health, (Reason.UNMONITORED,)), most_links=most_links, ecc_before=ecc_before, links_since=links_since
    )
    shown = dict(_shown(reading, most_links, ecc_before, links_since))
    for reason, message in shown.items():
        now = _with(now, reason, message, at_s)
    unfit = any(STATES[reason] == "unhealthy" for reason in shown)
    now = replace(now, answers=0 if unfit else min(now.answers + 1, ANSWERS_TO_RECOVER))
    return without(now, _over(now, shown, at_s))


def _over(health: GpuHealth, shown: dict[Reason, str], at_s: float) -> Iterator[Reason]:
    """Conditions that stand and are no longer there."""
    for reason in health.standing:
        if reason in shown or reason is Reason.SELF_TEST:  # only another self-test ends that
            continue
        if reason in SENSORS:
            if at_s - health.seen_s.get(reason, at_s) >= CALM_S:
                yield reason
        elif STATES[reason] == "degraded" or health.answers >= ANSWERS_TO_RECOVER:
            yield reason


def _shown(
    reading: Reading, most_links: int, ecc_before: int | None, links_since: Beginning
) -> Iterator[tuple[Reason, str]]:
    if reading.recovery_action:
        yield Reason.RECOVERY, f"the driver requests recovery action {reading.recovery_action}"
    if reading.rows_failed:
        yield Reason.REMAP_FAILED, "a row of memory could not be remapped"
    if reading.rows_pending:
        yield Reason.REMAP_PENDING, "a row of memory is remapped when the GPU is reset"
    if reading.ecc_uncorrected is not None and ecc_before is not None and reading.ecc_uncorrected > ecc_before:
        yield Reason.ECC, "uncorrectable memory errors were counted"
    if reading.links_up is not None and reading.links_up < most_links:
        yield Reason.NVLINK, f"{most_links - reading.links_up} of {most_links} NVLinks are down"
    if errors := grown(links_since, reading.link_errors):
        yield Reason.NVLINK_ERRORS, errors
    slowdowns = reading.slowdowns or 0
    if slowdowns & THERMAL_BITS:
        yield Reason.THERMAL, "the clocks are reduced because the GPU is too hot"
    if slowdowns & POWER_BRAKE_BIT:
        yield Reason.POWER_BRAKE, "the clocks are reduced by the server's power brake"


def _with(health: GpuHealth, reason: Reason, message: str, at_s: float) -> GpuHealth:
    """A condition that stands keeps its time and its message: neither changes while it lasts."""
    standing = dict(health.standing)
    standing.setdefault(reason, GpuCondition(reason, STATES[reason], int(at_s), message[:200]))
    seen_s = {**health.seen_s, reason: at_s} if reason in SENSORS else health.seen_s
    return replace(health, standing=standing, seen_s=seen_s)


def without(health: GpuHealth, reasons: Iterable[Reason]) -> GpuHealth:
    """These conditions end."""
    gone = set(reasons)
    if not gone & health.standing.keys():
        return health
    standing = {reason: one for reason, one in health.standing.items() if reason not in gone}
    return replace(health, standing=standing)


def slowdown_names(bits: int) -> tuple[str, ...]:
    """The reasons in a set of bits, by nvidia-smi's names. Bits that this version does not know are left out."""
    return tuple(name for bit, name in SLOWDOWNS.items() if bits & bit)

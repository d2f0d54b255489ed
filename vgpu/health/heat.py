"""How warm a GPU was in the last minutes: cool, normal or hot, by its power and temperature against its own limits. Pure.

The averages of `WINDOW_S` decide, so that a short burst of work changes nothing. What a pod will draw is never predicted. A class ends at another value
than it begins at, and a node's classes change at most once in `CHANGE_S`: the inventory is written for each change, and every extender reads it.

Times are seconds of a clock that never goes back.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Final, NamedTuple

from vgpu.api.inventory import NORMAL, HeatClass
from vgpu.health.conditions import Reading

WINDOW_S: Final = 600.0
"""Specified: issue K."""
SAMPLE_S: Final = 4.0
"""Readings that come sooner after the last one are left out. Guessed: a little less than the default of the setting `health-s`."""
LEAST_S: Final = 120.0
"""A GPU is normal until it was observed for so long. Guessed: a plugin that starts again and again writes no classes."""
STALE_S: Final = 60.0
"""A GPU without a reading for so long is normal. Guessed: twelve health queries, so NVML has hung or is away."""
CHANGE_S: Final = 60.0
"""Between two changes of a node's classes. Specified: issue K."""


class Bounds(NamedTuple):
    """`begin` and `end` of a class."""

    begin: float
    end: float


HOT_POWER: Final = Bounds(0.85, 0.75)
"""Parts of the power limit. All bounds are guessed. Near the limit clocks fall: measured 1,599 MHz instead of 1,928 (H200, bench/gpu_time)."""
COOL_POWER: Final = Bounds(0.40, 0.50)
HOT_HEADROOM_C: Final = Bounds(8.0, 12.0)
"""Degrees Celsius below the temperature at which the GPU reduces its clocks."""
COOL_HEADROOM_C: Final = Bounds(25.0, 20.0)


@dataclass(frozen=True, slots=True)
class HeatSample:
    """One reading of a GPU."""

    at_s: float
    power: float
    """Part of its power limit."""
    headroom_c: float | None
    """As in `Reading`; None = not reported."""


def with_reading(history: tuple[HeatSample, ...], reading: Reading, at_s: float) -> tuple[HeatSample, ...]:
    """The samples of the last `WINDOW_S`, oldest first. A reading without power or its limit is none."""
    if history and at_s - history[-1].at_s < SAMPLE_S:
        return history
    recent = tuple(one for one in history if at_s - one.at_s <= WINDOW_S)
    if reading.power_mw is None or not reading.power_limit_mw:
        return recent
    return (*recent, HeatSample(at_s, reading.power_mw / reading.power_limit_mw, reading.headroom_c))


def heat_class(before: HeatClass, history: Sequence[HeatSample], at_s: float) -> HeatClass:
    """The class now, after `before`."""
    recent = [one for one in history if at_s - one.at_s <= WINDOW_S]
    if not recent or at_s - recent[-1].at_s > STALE_S or at_s - recent[0].at_s < LEAST_S:
        return NORMAL
    power = fmean(one.power for one in recent)
    degrees = [one.headroom_c for one in recent if one.headroom_c is not None]
    headroom_c = fmean(degrees) if degrees else None
    if _is_hot(power, headroom_c, lasts=before == "hot"):
        return "hot"
    return "cool" if _is_cool(power, headroom_c, lasts=before == "cool") else NORMAL


def _is_hot(power: float, headroom_c: float | None, *, lasts: bool) -> bool:
    if lasts:
        return power >= HOT_POWER.end or (headroom_c is not None and headroom_c < HOT_HEADROOM_C.end)
    return power >= HOT_POWER.begin or (headroom_c is not None and headroom_c <= HOT_HEADROOM_C.begin)


def _is_cool(power: float, headroom_c: float | None, *, lasts: bool) -> bool:
    if lasts:
        return power <= COOL_POWER.end and (headroom_c is None or headroom_c >= COOL_HEADROOM_C.end)
    return power <= COOL_POWER.begin and (headroom_c is None or headroom_c >= COOL_HEADROOM_C.begin)


class NodeHeat:
    """The classes of a node's GPUs, as they go on."""

    def __init__(self) -> None:
        self.classes: Mapping[str, HeatClass] = {}
        """UUID -> class. GPUs that are normal are left out."""
        self._histories: dict[str, tuple[HeatSample, ...]] = {}
        self._changed_s: float | None = None

    def read(self, uuid: str, reading: Reading, at_s: float) -> None:
        """A GPU was read."""
        self._histories[uuid] = with_reading(self._histories.get(uuid, ()), reading, at_s)

    def keep_only(self, uuids: Collection[str]) -> None:
        """Other GPUs are no longer in the machine."""
        for uuid in self._histories.keys() - set(uuids):
            del self._histories[uuid]

    def changed(self, at_s: float) -> bool:
        """Bring `classes` up to date, at most once in `CHANGE_S`. Returns whether one changed."""
        if self._changed_s is not None and at_s - self._changed_s < CHANGE_S:
            return False
        found = {
            uuid: heat_class(self.classes.get(uuid, NORMAL), history, at_s) for uuid, history in self._histories.items()
        }
        now = {uuid: one for uuid, one in found.items() if one != NORMAL}
        if now == self.classes:
            return False
        self.classes, self._changed_s = now, at_s
        return True

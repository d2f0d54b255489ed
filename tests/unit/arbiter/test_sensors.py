"""What the arbiter reads of the GPUs' sensors, and what it reports when it cannot."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from arbiter.sensors import STALE_S, GpuSensors
from nvml.errors import NvmlAway
from nvml.messages import AnyReply, AnyRequest, ErrorReply, HealthReply
from nvml.queries import Nvml
from vgpu.health.conditions import Reading

ONE, OTHER = "GPU-1", "GPU-2"
BUSY = Reading(
    temperature_c=70, headroom_c=20, power_mw=700_000, power_limit_mw=700_000, sm_clock_mhz=1599, sm_clock_max_mhz=1980, slowdowns=4,
    link_replays=3, link_recoveries=None, link_crc_errors=4,
)  # fmt: skip


class Driver:
    """A carrier whose answers a test sets."""

    def __init__(self) -> None:
        self.there = True
        self.replies: dict[str, AnyReply] = {}
        self.uuids: set[str] = {ONE}
        self.at_s = 0.0
        self.sensors = GpuSensors(Nvml(self), lambda: frozenset(self.uuids), lambda: self.at_s)

    def call_all(self, requests: Sequence[AnyRequest]) -> list[AnyReply]:
        if not self.there:
            raise NvmlAway("no plugin")
        return [self.replies.get(request.key, HealthReply("silent")) for request in requests]

    def passes(self, seconds: float) -> None:
        """Reads every 2 s meanwhile."""
        for _ in range(int(seconds / 2)):
            self.at_s += 2
            self.sensors.read()


@pytest.fixture
def driver() -> Driver:
    return Driver()


def test_the_plugins_heat_class_counts_and_what_it_read(driver: Driver) -> None:
    driver.replies[ONE] = HealthReply(None, BUSY, heat="cool")
    driver.passes(600)
    (shown,) = driver.sensors.statuses()
    assert (shown.uuid, shown.heat, shown.sm_clock_mhz, shown.sm_clock_max_mhz) == (ONE, "cool", 1599, 1980)
    assert (shown.temperature_c, shown.headroom_c, shown.power_mw, shown.power_limit_mw) == (70, 20, 700_000, 700_000)
    assert shown.slowdowns == ("sw_power_cap",)
    assert shown.link_errors == 7


def test_without_a_plugin_the_class_is_determined_here(driver: Driver) -> None:
    driver.replies[ONE] = HealthReply(None, BUSY)
    driver.passes(60)
    assert [one.heat for one in driver.sensors.statuses()] == ["normal"]
    driver.passes(300)
    assert [one.heat for one in driver.sensors.statuses()] == ["hot"]


def test_what_is_out_of_date_is_left_out_and_others_go_on(driver: Driver) -> None:
    driver.uuids = {ONE, OTHER}
    driver.replies = {ONE: HealthReply(None, BUSY), OTHER: HealthReply(None, BUSY)}
    driver.passes(2)
    driver.replies[OTHER] = ErrorReply("GPU-2: a call does not return", kind="hung")
    driver.passes(STALE_S - 3)
    assert [one.uuid for one in driver.sensors.statuses()] == [ONE, OTHER]
    driver.passes(8)
    assert [one.uuid for one in driver.sensors.statuses()] == [ONE]
    driver.there = False
    with pytest.raises(NvmlAway):
        driver.sensors.read()
    driver.at_s += STALE_S + 1
    assert driver.sensors.statuses() == ()


def test_a_gpu_without_containers_is_not_read_and_has_no_row(driver: Driver) -> None:
    driver.replies[ONE] = HealthReply(None, BUSY)
    driver.passes(2)
    driver.uuids, driver.there = set(), False
    driver.sensors.read()
    assert driver.sensors.statuses() == ()

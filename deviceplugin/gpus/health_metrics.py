"""Health of the node's GPUs and what their sensors show, as metrics: read at each scrape, from the last health query."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from vgpu.api.inventory import CORDON_STATES, HEAT_CLASSES, WORST_FIRST, Inventory
from vgpu.health.conditions import SLOWDOWNS, Reading
from vgpu.health.owners import Source

LABELS: Final = ("gpu_uuid", "gpu_index")
WATT_MW: Final = 1000
MHZ: Final = 1_000_000


class HealthCollector(Collector):
    """`readings`: UUID -> the last one; a GPU that does not answer has none, and then no series."""

    def __init__(
        self,
        inventory: Callable[[], Inventory] = lambda: Inventory(()),
        readings: Callable[[], Mapping[str, Reading]] = dict,
    ) -> None:
        self._inventory, self._readings = inventory, readings

    def collect(self) -> Iterator[Metric]:
        """Health, cordons, heat, sensors."""
        gpus, readings = self._inventory().gpus, self._readings()
        state = GaugeMetricFamily(
            "tangram_gpu_health_state", f"1 for the state of the GPU, 0 for the others: {', '.join(reversed(WORST_FIRST))}.", labels=(*LABELS, "state"),
        )  # fmt: skip
        since = GaugeMetricFamily(
            "tangram_gpu_condition_since_timestamp_seconds", "Since when a condition of the GPU has lasted, by its reason.", labels=(*LABELS, "reason", "state"),
        )  # fmt: skip
        heat = GaugeMetricFamily(
            "tangram_gpu_heat_class", f"1 for the heat class of the GPU, 0 for the others: {', '.join(HEAT_CLASSES)}.", labels=(*LABELS, "class"),
        )  # fmt: skip
        cordoned = GaugeMetricFamily(
            "tangram_gpu_cordoned", f"1 for the state of a GPU that new pods do not get because of a cordon or a self-test, 0 for the others: {', '.join(CORDON_STATES)}.", labels=(*LABELS, "state"),
        )  # fmt: skip
        slowed = GaugeMetricFamily(
            "tangram_gpu_throttle_reason", "1 while the GPU's clocks are reduced for the reason, else 0.", labels=(*LABELS, "reason")
        )  # fmt: skip
        gauges = [GaugeMetricFamily(name, what, labels=LABELS) for name, what, _ in _GAUGES]
        counters = [CounterMetricFamily(name, what, labels=LABELS) for name, what, _ in _COUNTERS]
        for gpu in gpus:
            labels = (gpu.uuid, str(gpu.index))
            for one in WORST_FIRST:
                state.add_metric((*labels, one), gpu.state == one)
            for cordon in CORDON_STATES:
                cordoned.add_metric((*labels, cordon), gpu.cordon == cordon)
            for condition in gpu.conditions:
                since.add_metric((*labels, condition.reason, condition.state), condition.since_s)
            for number, name in enumerate(HEAT_CLASSES):
                heat.add_metric((*labels, name), gpu.heat_number == number)
            reading = readings.get(gpu.uuid)
            if reading is not None:
                _add(labels, reading, slowed, gauges, counters)
        yield from (state, since, cordoned, heat, slowed, *gauges, *counters)


class OwnerSourceCollector(Collector):
    """`failing`: sources that do not answer, and why."""

    def __init__(self, failing: Callable[[], Mapping[Source, str]]) -> None:
        self._failing = failing

    def collect(self) -> Iterator[Metric]:
        """One family."""
        failing = self._failing()
        family = GaugeMetricFamily(
            "tangram_deviceplugin_owner_source_up",
            "1 while the source answers which GPUs of the node other plugins have: kubelet, resourceslices. Else 0.", labels=("source",),
        )  # fmt: skip
        for source, name in ((Source.KUBELET, "kubelet"), (Source.SLICES, "resourceslices")):
            family.add_metric((name,), source not in failing)
        yield family


def _add(
    labels: tuple[str, str], reading: Reading, slowed: GaugeMetricFamily, gauges: list[GaugeMetricFamily], counters: list[CounterMetricFamily],
) -> None:  # fmt: skip
    if reading.slowdowns is not None:
        for bit, name in SLOWDOWNS.items():
            slowed.add_metric((*labels, name), bool(reading.slowdowns & bit))
    for family, (_, _, value_of) in zip(gauges, _GAUGES, strict=True):
        if (value := value_of(reading)) is not None:
            family.add_metric(labels, value)
    for counter, (_, _, count_of) in zip(counters, _COUNTERS, strict=True):
        if (value := count_of(reading)) is not None:
            counter.add_metric(labels, value)


def _watts(milliwatts: int | None) -> float | None:
    return None if milliwatts is None else milliwatts / WATT_MW


def _hertz(megahertz: int | None) -> float | None:
    return None if megahertz is None else megahertz * MHZ


_Value = Callable[[Reading], float | None]
_GAUGES: Final[tuple[tuple[str, str, _Value], ...]] = (
    ("tangram_gpu_temperature_celsius", "Temperature of the GPU.", lambda one: one.temperature_c),
    ("tangram_gpu_power_watts", "Power that the GPU draws.", lambda one: _watts(one.power_mw)),
    ("tangram_gpu_power_limit_watts", "Power limit that is enforced on the GPU.", lambda one: _watts(one.power_limit_mw)),
    ("tangram_gpu_temperature_headroom_celsius", "Degrees by which the GPU is below the temperature at which it reduces its clocks.", lambda one: one.headroom_c),
    ("tangram_gpu_sm_clock_hertz", "Clock of the GPU's multiprocessors.", lambda one: _hertz(one.sm_clock_mhz)),
    ("tangram_gpu_sm_clock_max_hertz", "Highest clock that the GPU's multiprocessors may have.", lambda one: _hertz(one.sm_clock_max_mhz)),
    ("tangram_gpu_remapped_rows_corrected", "Rows of memory remapped because of correctable errors.", lambda one: one.rows_corrected),
    ("tangram_gpu_remapped_rows_uncorrected", "Rows of memory remapped because of uncorrectable errors.", lambda one: one.rows_uncorrected),
    ("tangram_gpu_nvlinks_active", "NVLinks of the GPU that are active.", lambda one: one.links_up),
)  # fmt: skip
_COUNTERS: Final[tuple[tuple[str, str, _Value], ...]] = (
    ("tangram_gpu_ecc_corrected_errors", "Corrected memory errors since the driver was loaded.", lambda one: one.ecc_corrected),
    ("tangram_gpu_ecc_uncorrected_errors", "Uncorrectable memory errors since the driver was loaded.", lambda one: one.ecc_uncorrected),
    ("tangram_gpu_pcie_replays", "PCIe packets that were sent again, as the driver counts.", lambda one: one.pcie_replays),
    ("tangram_gpu_nvlink_replays", "Packets that the GPU's NVLinks sent again, as the driver counts.", lambda one: one.link_replays),
    ("tangram_gpu_nvlink_recoveries", "Recoveries of the GPU's NVLinks: a link broke and was set up again.", lambda one: one.link_recoveries),
    ("tangram_gpu_nvlink_crc_errors", "CRC errors of the GPU's NVLinks.", lambda one: one.link_crc_errors),
)  # fmt: skip

"""What `top` says of the GPUs."""

from __future__ import annotations

import pytest
from rich.console import Console

from tangramctl import screen, top
from tangramctl.view import GpuView, RunView, StateRootView
from vgpu.protocol.status import GpuTimeStatus, SensorStatus

UUID = "GPU-aaaaaaaa-0000-0000-0000-000000000000"


def entry(key: str, on_s: float, index: int | None = 0) -> RunView:
    gpu_time = GpuTimeStatus(True, True, 1, 0, on_s, 0.0, 0.0, 0, "", "suspend")
    gpu = GpuView(UUID, index, "NVIDIA H200", 2**30, 0)
    return RunView("run", key, key, 7, "python x", 0, "standard", 2, False, None, (gpu,), (), gpu_time)


def table(*got_s: float, index: int | None = 0, **shown: object) -> top.TopTable:
    """Of runs that got so much of a second, and a GPU that shows this."""
    sensors = (SensorStatus(UUID, **({"heat": "normal"} | shown)),)  # type: ignore[arg-type]
    keys = [f"run-{number}" for number in range(len(got_s))]
    before = StateRootView(tuple(entry(key, 1.0, index) for key in keys))
    now = tuple(entry(key, 1.0 + got, index) for key, got in zip(keys, got_s, strict=True))
    return top.between(before, StateRootView(now, sensors=sensors), 1.0)


CAPPED = {
    "heat": "hot", "temperature_c": 66, "power_mw": 698_600, "power_limit_mw": 700_000, "sm_clock_mhz": 1599, "sm_clock_max_mhz": 1980,
}  # fmt: skip


@pytest.mark.parametrize(
    ("got_s", "slowdowns", "notes"),
    [
        ((0.5, 0.4), ("sw_power_cap",), ["GPU 0: its power limit reduces the clock (1599 of 1980 MHz): its 2 containers slow each other"]),
        ((0.5, 0.0), ("sw_power_cap",), ["GPU 0: its power limit reduces the clock (1599 of 1980 MHz)"]),
        ((0.5, 0.4), ("gpu_idle", "sync_boost"), []),
        ((0.5,), ("hw_slowdown", "hw_power_brake_slowdown"), ["GPU 0: the server's power brake reduces the clock (1599 of 1980 MHz): the GPUs of this server slow each other"]),
        ((0.5,), ("hw_thermal_slowdown", "sw_thermal_slowdown"), ["GPU 0: heat reduces the clock (1599 of 1980 MHz)"]),
    ],
)  # fmt: skip
def test_containers_that_slow_each_other_are_named_below_the_table(
    got_s: tuple[float, ...], slowdowns: tuple[str, ...], notes: list[str]
) -> None:
    assert list(table(*got_s, **CAPPED, slowdowns=slowdowns).notes) == notes


@pytest.mark.parametrize(
    ("before", "now", "notes"),
    [
        (3, 5, ["GPU 0: its NVLinks counted 2 errors meanwhile"]),
        (5, 5, []),
        (5, 1, []),  # the driver was loaded again
        (None, 5, []),
        (5, None, []),
    ],
)
def test_errors_of_nvlinks_between_the_readings_are_named(
    before: int | None, now: int | None, notes: list[str]
) -> None:
    views = [
        StateRootView((entry("run", 1.0),), sensors=(SensorStatus(UUID, "normal", link_errors=count),))
        for count in (before, now)
    ]
    assert list(top.between(views[0], views[1], 1.0).notes) == notes


def drawn(shown: top.TopTable, width: int = 200) -> str:
    console = Console(width=width)
    with console.capture() as printed:
        console.print(screen.drawn_top(shown, width))
    return printed.get()


def test_a_second_table_has_the_gpus() -> None:
    lines = drawn(table(0.5, 0.4, **CAPPED, slowdowns=("sw_power_cap", "gpu_idle"))).splitlines()
    at = next(number for number, line in enumerate(lines) if line.startswith("GPU "))
    assert lines[at].split() == ["GPU", "CLOCK", "POWER", "TEMPERATURE", "HEAT", "SLOWED", "BY"]
    assert lines[at + 1].split() == [
        "0",
        *["1599", "of", "1980", "MHz", "699", "of", "700", "W", "66", "C", "hot", "sw_power_cap"],
    ]


def test_what_is_not_reported_is_a_question_mark_and_a_pods_gpu_has_its_uuid() -> None:
    shown = drawn(table(0.5, index=None)).splitlines()
    assert shown[-1].split() == [UUID[:12], "?", "?", "?", "normal", "-"]
    assert drawn(table()).splitlines()[0] == "no run computes"


@pytest.mark.parametrize("width", [20, 30, 50])
def test_a_narrow_terminal_shows_gpu_and_clock_longest(width: int) -> None:
    lines = drawn(table(0.5, **CAPPED), width).splitlines()
    (header,) = [line for line in lines if line.startswith("GPU ") and "CLOCK" in line]
    assert header.split()[:2] == ["GPU", "CLOCK"]


def test_an_earlier_arbiter_reports_no_sensors_and_there_is_no_second_table() -> None:
    shown = top.between(StateRootView((entry("a", 1.0),)), StateRootView((entry("a", 1.5),)), 1.0)
    assert shown.gpus == ()
    assert "CLOCK" not in drawn(shown)

"""Health of a GPU through any sequence of what its driver reports."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vgpu.api.inventory import Gpu, GpuCondition
from vgpu.health.conditions import (
    ANSWERS_TO_RECOVER,
    APPLICATION_XIDS,
    CALM_S,
    GPU_IS_LOST,
    SENSORS,
    STATES,
    GpuHealth,
    Reading,
    Reason,
    after_away,
    after_failure,
    after_reading,
    after_xid,
    slowdown_names,
)
from vgpu.health.node_health import NodeHealth

WELL = Reading(
    ecc_uncorrected=0, links_up=18, slowdowns=0, rows_pending=False, rows_failed=False,
    link_replays=100, link_recoveries=1, link_crc_errors=0,
)  # fmt: skip


def reasons(health: GpuHealth) -> list[str]:
    return [one.reason for one in health.conditions]


@given(st.lists(st.one_of(st.integers(1, 120), st.just("well"), st.just("silent"), st.just("away"))))
def test_a_gpu_is_unhealthy_from_the_first_trouble_until_it_has_answered_often_enough(events: list[int | str]) -> None:
    health, unhealthy, away, answered = GpuHealth(), False, False, 0
    for at_s, event in enumerate(events):
        match event:
            case int():
                health, trouble = after_xid(health, event, at_s), event not in APPLICATION_XIDS
            case "silent":
                health, trouble, away = after_failure(health, "it is silent", at_s), True, False
            case "away":
                health, trouble, away, answered = after_away(health, "no child", at_s), False, True, 0
            case _:
                health, trouble, away, answered = after_reading(health, WELL, at_s), False, False, answered + 1
        if trouble:
            unhealthy, answered = True, 0
        elif answered >= ANSWERS_TO_RECOVER:
            unhealthy = False
        assert any(one.state == "unhealthy" for one in health.conditions) == unhealthy
        assert (Reason.UNMONITORED in health.standing) == away


@pytest.mark.parametrize("xid", sorted(APPLICATION_XIDS))
def test_an_xid_of_a_program_is_not_the_fault_of_the_gpu(xid: int) -> None:
    assert after_xid(GpuHealth(), xid, 0) == GpuHealth()


@pytest.mark.parametrize(
    ("reading", "reason"),
    [
        (replace(WELL, recovery_action=1), Reason.RECOVERY),
        (replace(WELL, rows_failed=True), Reason.REMAP_FAILED),
        (replace(WELL, rows_pending=True), Reason.REMAP_PENDING),
        (replace(WELL, ecc_uncorrected=1), Reason.ECC),
        (replace(WELL, links_up=17), Reason.NVLINK),
        (replace(WELL, link_replays=6_100), Reason.NVLINK_ERRORS),
        (replace(WELL, link_recoveries=3), Reason.NVLINK_ERRORS),
        (replace(WELL, link_crc_errors=6_000), Reason.NVLINK_ERRORS),
        (replace(WELL, slowdowns=0x40), Reason.THERMAL),
        (replace(WELL, slowdowns=0x20), Reason.THERMAL),
        (replace(WELL, slowdowns=0x80), Reason.POWER_BRAKE),
    ],
)
def test_what_a_sensor_shows_is_a_condition_that_ends_when_it_is_over(reading: Reading, reason: Reason) -> None:
    health = after_reading(after_reading(GpuHealth(), WELL, 0), reading, 10)
    health = after_reading(health, reading, 20)
    (condition,) = health.conditions
    assert (condition.reason, condition.state, condition.since_s) == (reason, STATES[reason], 10)
    ends_s = 20 + CALM_S if reason in SENSORS else 30
    before = after_reading(health, WELL, ends_s - 1)
    assert reasons(before) == ([reason] if reason is not Reason.REMAP_PENDING else [])
    assert reasons(after_reading(before, WELL, ends_s)) == []


def test_power_caps_and_idle_clocks_are_no_condition() -> None:
    assert reasons(after_reading(GpuHealth(), replace(WELL, slowdowns=0x1 | 0x2 | 0x4 | 0x10), 0)) == []
    assert slowdown_names(0x4 | 0x80 | 1 << 40) == ("sw_power_cap", "hw_power_brake_slowdown")


def test_errors_of_before_the_start_do_not_count_and_those_after_a_reset_do() -> None:
    health = after_reading(GpuHealth(), replace(WELL, ecc_uncorrected=5), 0)
    assert reasons(health) == []
    health = after_reading(health, replace(WELL, ecc_uncorrected=0), 1)  # a reset cleared the counter
    assert reasons(after_reading(health, replace(WELL, ecc_uncorrected=2), 2)) == [Reason.ECC]


def test_errors_of_nvlinks_count_only_if_they_come_fast_and_are_not_those_of_before_the_start() -> None:
    health = after_reading(GpuHealth(), replace(WELL, link_replays=10**9), 0)
    for minute in range(1, 6):  # 5,999 in each minute, and a recovery in each
        slow = replace(WELL, link_replays=10**9 + 5_999 * minute, link_recoveries=1 + minute)
        health = after_reading(health, slow, 61 * minute)
        assert reasons(health) == []
    after_reset = replace(WELL, link_replays=0, link_recoveries=0)
    health = after_reading(health, after_reset, 306)
    assert reasons(health) == []
    health = after_reading(health, replace(after_reset, link_recoveries=2), 310)
    (condition,) = health.conditions
    assert (condition.reason, condition.message) == (Reason.NVLINK_ERRORS, "NVLinks counted 2 recoveries within 60 s")


def test_counters_of_nvlinks_that_are_not_reported_are_no_errors() -> None:
    none = replace(WELL, link_replays=None, link_recoveries=None, link_crc_errors=None)
    health = after_reading(after_reading(GpuHealth(), none, 0), replace(WELL, link_recoveries=50), 1)
    assert reasons(health) == []
    assert reasons(after_reading(health, none, 2)) == []


def test_a_lost_gpu_fell_off_the_bus_and_a_call_that_hangs_has_its_own_reason() -> None:
    assert reasons(after_failure(GpuHealth(), "lost", 0, code=GPU_IS_LOST)) == [Reason.OFF_THE_BUS]
    assert reasons(after_failure(GpuHealth(), "hangs", 0, hung=True)) == [Reason.HUNG]


@given(st.lists(st.tuples(st.sampled_from("xraf"), st.integers(0, 3)), max_size=30))
def test_a_condition_keeps_its_time_and_its_message_while_it_stands(events: list[tuple[str, int]]) -> None:
    health = GpuHealth()
    for at_s, (event, number) in enumerate(events):
        before = dict(health.standing)
        match event:
            case "x":
                health = after_xid(health, 60 + number, at_s)
            case "r":
                health = after_reading(health, replace(WELL, slowdowns=0x40 if number else 0), at_s)
            case "a":
                health = after_away(health, f"away {number}", at_s)
            case _:
                health = after_failure(health, f"silent {number}", at_s)
        assert all(health.standing[reason] == before[reason] for reason in health.standing.keys() & before.keys())
        assert [one.reason for one in health.conditions] == sorted(health.standing, key=list(Reason).index)


def test_a_node_forgets_gpus_that_went_and_reports_changes_only() -> None:
    node = NodeHealth()
    assert node.xid("a", 79, 0) is True
    assert node.xid("a", 79, 1) is False
    assert node.answered("b", WELL, 2) is False
    assert list(node.conditions) == ["a"]
    assert node.stands("a")
    node.keep_only(["b"])
    assert node.conditions == {}
    assert node.away(["b"], "no child", 3) is True
    assert node.readings == {}
    node.back()
    assert node.conditions == {}


def test_a_failed_self_test_stands_when_the_gpu_was_away() -> None:
    node = NodeHealth()
    node.tested("a", "bad memory", 7)
    node.xid("a", 79, 8)
    node.keep_only([])
    node.keep_only(["a"])
    assert [(one.reason, one.message, one.since_s) for one in node.conditions["a"]] == [
        (Reason.SELF_TEST, "bad memory", 7)
    ]
    node.tested("a", "", 9)
    assert node.conditions == {}


@pytest.mark.parametrize(
    ("states", "healthy", "state"),
    [((), True, "healthy"), ((), False, "unhealthy"), (("degraded",), True, "degraded"), (("degraded", "unmonitored"), False, "unmonitored"),
     (("unmonitored", "unhealthy"), False, "unhealthy"), (("later",), True, "healthy")],
)  # fmt: skip
def test_the_state_of_a_gpu_is_that_of_its_worst_condition(states: tuple[str, ...], healthy: bool, state: str) -> None:
    gpu = Gpu("GPU-1", 0, "m", 1, healthy=healthy, conditions=tuple(GpuCondition("R", one, 0) for one in states))
    assert gpu.state == state

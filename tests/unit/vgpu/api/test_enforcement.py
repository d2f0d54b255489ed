"""Enforced, refused or unenforced: the states of a container's limits, and every way from one to another."""

from __future__ import annotations

import csv
from dataclasses import replace
from math import inf
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vgpu.api.enforcement import (
    GATED_EXACT_POINTS,
    GATED_POINTS,
    NO_CHANNELS_S,
    REPORTED,
    SILENT_S,
    STALE_S,
    STALLED_S,
    TABLE,
    ContainerFacts,
    Enforcement,
    Finding,
    Limit,
    LimitState,
    ProcessFacts,
    Reason,
    enforcement,
    gating_points,
    reported,
)

REPOSITORY = Path(__file__).parents[4]

PROCESS = ProcessFacts(7)
FINE = ContainerFacts(processes=(PROCESS,))
ENFORCED = Enforcement(LimitState.ENFORCED, LimitState.ENFORCED)
SECONDS = st.one_of(st.none(), st.floats(0, 10))
PROCESSES = st.builds(
    ProcessFacts, st.integers(0, 5), st.frozensets(st.sampled_from(list(REPORTED.values()))), SECONDS, SECONDS
)
FACTS = st.builds(
    ContainerFacts,
    *(st.booleans(), st.sampled_from([0, 30]), st.booleans(), st.booleans()),
    *(
        st.sampled_from([None, Reason.UNKNOWN_DRIVER, Reason.NO_SUSPEND]),
        st.sampled_from([None, 2.0, 9.0]),
        st.booleans(),
    ),
    stalled_s=st.floats(0, 10),
    reading_s=st.floats(0, 10),
    stall_ended_s=st.just(inf) | st.floats(0, 10),
    over_limit_pids=st.lists(st.integers(1, 5), max_size=2).map(tuple),
    processes=st.lists(PROCESSES, max_size=3).map(tuple),
    best_effort=st.booleans(),
)


def with_process(**facts: object) -> ContainerFacts:
    return replace(FINE, processes=(replace(PROCESS, **facts),))  # type: ignore[arg-type]


CAUSES = {
    **{reason: with_process(reported=frozenset({reason})) for reason in REPORTED.values()},
    Reason.UNKNOWN_REASON: with_process(reported=frozenset({reported(31)})),
    Reason.GATED: replace(FINE, gated=True, core_percent=30),
    Reason.MPS: with_process(mps=True),
    Reason.UNKNOWN_DRIVER: replace(FINE, denied=Reason.UNKNOWN_DRIVER),
    Reason.NO_SUSPEND: replace(FINE, denied=Reason.NO_SUSPEND),
    Reason.SILENT_PROCESS: with_process(recall_s=SILENT_S),
    Reason.UNCONNECTED: with_process(unconnected=True),
    Reason.BYPASSING: with_process(bypassing=True),
    Reason.UNATTRIBUTED: replace(FINE, unattributed=True),
    Reason.ARBITER_STALLED: replace(FINE, stalled_s=STALLED_S),
    Reason.NVML: replace(FINE, reading_s=STALE_S + 0.1),
    Reason.OVER_LIMIT: replace(FINE, over_limit_pids=(7,)),
}


@given(FACTS)
def test_whatever_is_known_each_limit_is_in_one_of_three_states(facts: ContainerFacts) -> None:
    found = enforcement(facts)
    for limit, state in ((Limit.MEMORY, found.memory), (Limit.GPU_TIME, found.gpu_time)):
        reasons = [one.reason for one in found.findings if limit in TABLE[one.reason].limits]
        if reasons:
            assert state is LimitState.UNENFORCED
        else:
            assert state is (LimitState.ENFORCED if facts.grant_readable else LimitState.REFUSED)


@given(FACTS)
def test_no_report_of_a_library_is_lost(facts: ContainerFacts) -> None:
    found = {finding.reason: finding.pids for finding in enforcement(facts).findings}
    for process in facts.processes:
        for reason in process.reported - {Reason.NO_CHANNELS}:
            assert reason in found
            assert not process.pid or process.pid in found[reason]
        if Reason.NO_CHANNELS in process.reported:
            assert found.keys() & {
                Reason.NO_CHANNELS, Reason.MPS, Reason.NO_THREAD, Reason.NO_UUID, Reason.CHANNELS_UNLISTED
            }  # fmt: skip


@given(st.integers(0, 2**32 - 1))
def test_every_number_that_a_library_may_report_has_a_reason(number: int) -> None:
    assert reported(number) in TABLE


def test_every_reason_has_a_cause_a_row_and_a_limit() -> None:
    assert set(CAUSES) == set(Reason) == set(TABLE)
    for row in TABLE.values():
        assert row.limits
        assert row.means.endswith(".")
        assert row.do.endswith(".")


@pytest.mark.parametrize("reason", Reason)
def test_a_reason_begins_with_its_cause_and_ends_with_it(reason: Reason) -> None:
    assert enforcement(FINE) == ENFORCED
    found = enforcement(CAUSES[reason])
    assert [finding.reason for finding in found.findings] == [reason]
    assert found.memory is (LimitState.UNENFORCED if Limit.MEMORY in TABLE[reason].limits else LimitState.ENFORCED)
    assert found.gpu_time is (LimitState.UNENFORCED if Limit.GPU_TIME in TABLE[reason].limits else LimitState.ENFORCED)


@pytest.mark.parametrize("reason", Reason)
def test_a_grant_that_cannot_be_read_any_more_refuses_what_is_not_unenforced(reason: Reason) -> None:
    assert enforcement(replace(FINE, grant_readable=False)) == Enforcement(LimitState.REFUSED, LimitState.REFUSED)
    found = enforcement(replace(CAUSES[reason], grant_readable=False))
    assert {found.memory, found.gpu_time} <= {LimitState.REFUSED, LimitState.UNENFORCED}
    assert LimitState.UNENFORCED in (found.memory, found.gpu_time)


@pytest.mark.parametrize("reason", [one for one in Reason if one not in (Reason.OVER_LIMIT, Reason.UNATTRIBUTED)])
def test_the_last_process_takes_every_reason_with_it(reason: Reason) -> None:
    assert enforcement(replace(CAUSES[reason], processes=())) == ENFORCED


def test_a_container_over_its_limit_is_unenforced_whether_or_not_a_process_of_it_is_connected() -> None:
    for processes in ((), (PROCESS,)):
        found = enforcement(replace(FINE, over_limit_pids=(9, 4, 9), processes=processes))
        assert (found.memory, found.gpu_time) == (LimitState.UNENFORCED, LimitState.ENFORCED)
        assert found.findings == (Finding(Reason.OVER_LIMIT, (4, 9)),)


def test_a_container_whose_processes_are_not_seen_is_unenforced_whether_or_not_one_is_connected() -> None:
    for processes in ((), (PROCESS,)):
        found = enforcement(replace(FINE, unattributed=True, processes=processes))
        assert (found.memory, found.gpu_time) == (LimitState.UNENFORCED, LimitState.ENFORCED)
        assert found.findings == (Finding(Reason.UNATTRIBUTED),)


def test_a_container_over_its_limit_whose_grant_cannot_be_read_is_unenforced_while_it_lasts() -> None:
    facts = replace(FINE, grant_readable=False, processes=())
    assert enforcement(replace(facts, over_limit_pids=(4,))).memory is LimitState.UNENFORCED
    assert enforcement(facts).memory is LimitState.REFUSED


@pytest.mark.parametrize("facts", [
    with_process(without_channels_s=NO_CHANNELS_S - 0.01), with_process(recall_s=SILENT_S - 0.01),
    replace(FINE, stalled_s=STALLED_S - 0.01), replace(FINE, gated=True), replace(FINE, mps=True),
])  # fmt: skip
def test_what_is_short_of_a_cause_is_none(facts: ContainerFacts) -> None:
    assert enforcement(facts) == ENFORCED


def test_a_best_effort_container_is_not_gated_silently() -> None:
    """It requested no gpu-core, and yields late all the same."""
    found = enforcement(replace(FINE, gated=True, best_effort=True))
    assert (found.gpu_time, [one.reason for one in found.findings]) == (LimitState.UNENFORCED, [Reason.GATED])
    assert enforcement(replace(FINE, best_effort=True)) == ENFORCED


def test_no_channels_is_not_reported_of_a_process_with_a_more_specific_reason() -> None:
    facts = with_process(reported=frozenset({Reason.NO_THREAD}), without_channels_s=9.0)
    assert enforcement(facts).findings == (Finding(Reason.NO_THREAD, (7,)),)


def test_no_channels_under_an_mps_server_is_reported_as_mps() -> None:
    facts = replace(with_process(without_channels_s=NO_CHANNELS_S), mps=True)
    assert enforcement(facts).findings == (Finding(Reason.MPS, (7,)),)


def test_a_reason_names_each_of_its_processes() -> None:
    processes = (ProcessFacts(9, without_channels_s=3.0), PROCESS, ProcessFacts(8, without_channels_s=3.0))
    assert enforcement(replace(FINE, processes=processes)).findings == (Finding(Reason.NO_CHANNELS, (8, 9)),)


DENIED = replace(FINE, gated=True, core_percent=30, denied=Reason.NO_SUSPEND)


def test_a_gating_that_was_measured_to_be_exact_enforces_a_gpu_core() -> None:
    assert {one.reason for one in enforcement(DENIED).findings} == {Reason.GATED, Reason.NO_SUSPEND}
    assert enforcement(replace(DENIED, gating_points=GATED_EXACT_POINTS)) == ENFORCED
    assert enforcement(replace(DENIED, gating_points=GATED_EXACT_POINTS + 0.1)).gpu_time is LimitState.UNENFORCED


@pytest.mark.parametrize("facts", [
    replace(DENIED, core_percent=0), replace(DENIED, gated=False), replace(DENIED, denied=Reason.UNKNOWN_DRIVER),
    replace(DENIED, denied=None), replace(DENIED, partial=True), replace(DENIED, processes=CAUSES[Reason.NO_THREAD].processes),
])  # fmt: skip
def test_the_measurement_of_one_case_counts_for_no_other(facts: ContainerFacts) -> None:
    assert enforcement(replace(facts, gating_points=1.0)).gpu_time is LimitState.UNENFORCED


def test_gating_is_as_exact_as_its_figures() -> None:
    worst: dict[int, float] = {}
    with (REPOSITORY / "bench/gpu_time/gated.csv").open() as file:
        for row in csv.DictReader(file):
            if row["figure"] == "beside what was asked" and row["repeat"].isdecimal():
                branch = int(row["driver"].partition(".")[0])
                worst[branch] = max(worst.get(branch, 0.0), abs(float(row["value"])))
    assert worst.keys() == GATED_POINTS.keys()
    for branch, points in worst.items():
        assert points <= GATED_POINTS[branch] < points + 1


@pytest.mark.parametrize(("driver", "gpus", "known"), [
    ("580.159.04", 1, True), ("580.159.04", 2, False), ("570.1", 1, False), ("", 1, False), ("580", 0, False),
])  # fmt: skip
def test_the_figures_are_of_one_gpu_and_of_the_drivers_measured(driver: str, gpus: int, known: bool) -> None:
    assert (gating_points(driver, gpus) is not None) is known

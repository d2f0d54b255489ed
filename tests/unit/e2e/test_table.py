"""tests.e2e.matrix.table: what the fault matrix tries."""

from __future__ import annotations

from typing import get_args

import pytest

from tests.e2e.matrix.harm import LOSSES
from tests.e2e.matrix.table import FAULTS, NOT_TRIED, ROWS, STEPS, Fault, Part, Step, rounds

PAIRS = [(part, fault) for part in get_args(Part) for fault in get_args(Fault)]


@pytest.mark.parametrize(("part", "fault"), PAIRS)
def test_each_fault_of_each_part_is_tried_or_the_table_has_the_reason_why_not(part: Part, fault: Fault) -> None:
    tried = any((row.part, row.fault) == (part, fault) for row in ROWS)
    assert tried != ((part, fault) in NOT_TRIED)


@pytest.mark.parametrize("step", get_args(Step))
def test_each_step_meets_each_fault(step: Step) -> None:
    assert {row.fault for row in ROWS if step in row.steps} == set(FAULTS)


def test_ci_meets_each_fault_and_each_step() -> None:
    chosen = rounds(1, everything=False)
    assert {one.row.fault for one in chosen} == set(FAULTS)
    assert {one.step for one in chosen} == set(STEPS)


def test_ci_tries_a_part_of_what_make_faults_tries() -> None:
    assert all(set(row.ci) <= set(row.steps) for row in ROWS)


def test_a_seed_orders_the_rounds_and_loses_none() -> None:
    one, again, other = (rounds(seed, everything=True) for seed in (1, 1, 2))
    assert one == again
    assert one != other
    assert sorted(r.name for r in one) == sorted(r.name for r in other)


def test_no_two_rounds_have_one_name() -> None:
    names = [one.name for one in rounds(1, everything=True)]
    assert len(set(names)) == len(names)


def test_each_thing_that_is_lost_can_be_lost() -> None:
    assert {row.what for row in ROWS if row.fault == "lose"} == set(LOSSES)

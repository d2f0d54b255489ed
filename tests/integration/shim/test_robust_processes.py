"""However a process is created, it counts with its container, and its memory is free when it ends."""

from __future__ import annotations

import pytest

from tests.integration.shim.conftest import OUT_OF_MEMORY, Stage
from tests.integration.shim.robust import run


def test_a_process_that_forked_before_cuda_counts_beside_its_child(stage: Stage) -> None:
    assert run(stage, "processes", "fork").codes == [0, 0]


def test_a_program_started_by_vfork_counts_beside_its_parent(stage: Stage) -> None:
    children, parent = [0, OUT_OF_MEMORY], [0, 0, OUT_OF_MEMORY]
    assert run(stage, "processes", "vfork").codes == children + parent


def test_a_forked_child_exits_at_once_though_the_librarys_thread_is_in_a_slow_call_of_the_drivers(stage: Stage) -> None:
    assert run(stage, "processes", "ends", TANGRAM_FAKE_FAULTS="hang cuStreamQuery seconds=1").codes == [0, 0]


@pytest.mark.parametrize("descriptors", ["files", "copied"])
def test_a_process_that_shares_its_parents_memory_counts_with_it(stage: Stage, descriptors: str) -> None:
    ran = run(stage, "processes", "shares", descriptors, seconds=20)
    assert (ran.codes, ran.errors) == ([0, 0, OUT_OF_MEMORY, 0, OUT_OF_MEMORY], "")


def test_a_process_in_its_parents_memory_that_comes_first_is_refused_and_leaves_the_parent_its_limit(
    stage: Stage,
) -> None:
    assert run(stage, "processes", "first", seconds=20).codes == [0, 0]


def test_exec_frees_the_memory_of_the_program_before(stage: Stage) -> None:
    assert run(stage, "processes", "exec").codes == [0]


def test_32_processes_at_once_get_exactly_the_limit_together(stage: Stage) -> None:
    assert run(stage, "processes", "many").codes == [25, 7]


def test_the_memory_of_all_of_them_is_there_again(stage: Stage) -> None:
    run(stage, "processes", "many")
    assert run(stage, "processes", "take", "1000").codes == [0]

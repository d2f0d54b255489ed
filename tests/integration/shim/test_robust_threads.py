"""Threads, signals and cancellation, in the middle of leases."""

from __future__ import annotations

from tests.integration.shim.conftest import OUT_OF_MEMORY, Stage
from tests.integration.shim.robust import run


def test_threads_that_start_cuda_at_the_same_moment_all_get_memory(stage: Stage) -> None:
    assert run(stage, "threads", "start").codes == [0]


def test_the_smallest_stack_there_is_suffices(stage: Stage) -> None:
    assert run(stage, "threads", "tiny").codes == [0, 0]


def test_signals_that_interrupt_every_call_stop_no_lease(stage: Stage) -> None:
    assert run(stage, "threads", "signals").codes == [0, 0]


def test_a_cancelled_thread_leaves_no_lock_behind(stage: Stage) -> None:
    assert run(stage, "threads", "cancel").codes == [0, 0]


def test_libcuda_may_be_opened_and_closed_again_and_again(stage: Stage) -> None:
    assert run(stage, "threads", "reload").codes == [0, OUT_OF_MEMORY]

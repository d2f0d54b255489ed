"""Contexts: their memory is inside the limit, is requested before they are made, and free when they are gone."""

from __future__ import annotations

import signal

import pytest

from tests.integration.shim.conftest import CONTEXT_MIB, GPUS, MIB, OUT_OF_MEMORY, Stage, Worker, wait_for

CREATES = ("cuCtxCreate", "cuCtxCreate_v2", "cuCtxCreate_v3", "cuCtxCreate_v4")


def fills(worker: Worker, mib: int) -> None:
    """Exactly so much is left."""
    assert worker.free_mib() == mib
    assert worker.request(f"alloc({mib} + 1)")[0] == OUT_OF_MEMORY
    worker.must(f"alloc({mib})")


def test_a_context_counts_against_the_limit(measured: Stage) -> None:
    worker = measured.worker()
    fills(worker, 1000 - CONTEXT_MIB)
    assert measured.true_mib(worker) == 1000


def test_the_very_first_context_on_a_node_counts_before_anything_is_allocated(own_measured: Stage) -> None:
    worker = own_measured.worker()
    fills(worker, 1000 - CONTEXT_MIB)
    assert own_measured.true_mib(worker) == 1000


def test_memory_is_reserved_beside_a_context_for_code_that_is_loaded_later(own_measured: Stage) -> None:
    own_measured.stop_arbiter(another=True)
    own_measured.start_measuring_arbiter("--context-room-mib", "60")
    fills(own_measured.worker(), 1000 - CONTEXT_MIB - 60)


def test_a_context_that_does_not_fit_is_refused_before_it_is_made(measured: Stage) -> None:
    one, two = measured.worker(), measured.bare_worker()
    at = one.must(f"alloc({1000 - CONTEXT_MIB - CONTEXT_MIB + 1})")
    assert two.request("use()")[0] == OUT_OF_MEMORY
    assert measured.true_mib(one, two) <= 1000
    one.must(f"free({at})")
    assert two.request("use()")[0] == 0, "what the sibling freed is recalled for it"


@pytest.mark.parametrize("name", CREATES)
def test_every_way_to_make_a_context_is_requested_and_given_back(measured: Stage, name: str) -> None:
    worker, other = measured.bare_worker(), measured.worker()
    worker.must("initialise()")
    other.must(f"alloc({1000 - CONTEXT_MIB - CONTEXT_MIB + 1})")
    assert worker.request(f"context_by('{name}')")[0] == OUT_OF_MEMORY
    other.kill()
    context = worker.must(f"context_by('{name}')")
    fills(worker, 1000 - CONTEXT_MIB)
    worker.must(f"context_end({context})")
    wait_for(lambda: measured.status().gpus[0].context_bytes == 0)


@pytest.mark.parametrize("end", ["leave()", "reset()"])
def test_a_primary_context_that_ends_gives_its_memory_and_what_was_allocated_in_it_back(
    measured: Stage, end: str
) -> None:
    worker = measured.worker()
    worker.must("alloc(500)")
    worker.must(end)
    wait_for(lambda: measured.status().gpus[0].context_bytes == 0)
    worker.must("use()")
    fills(worker, 1000 - CONTEXT_MIB)


def test_a_green_context_keeps_the_primary_one_and_its_memory_goes_with_the_last_of_both(measured: Stage) -> None:
    worker, other = measured.bare_worker(), measured.worker()
    worker.must("initialise()")
    other.must(f"alloc({1000 - CONTEXT_MIB - CONTEXT_MIB + 1})")
    assert worker.request("green()")[0] == OUT_OF_MEMORY
    other.kill()
    one, two = worker.must("green()"), worker.must("green()")
    fills(worker, 1000 - CONTEXT_MIB)
    worker.must(f"green_end({one})")
    assert worker.free_mib() == 0
    worker.must(f"green_end({two})")
    wait_for(lambda: measured.status().gpus[0].context_bytes == 0)
    worker.must("green()")
    fills(worker, 1000 - CONTEXT_MIB)


def test_a_second_context_of_a_process_is_measured_within_seconds(measured: Stage) -> None:
    worker = measured.worker()
    worker.must("context_new()")
    wait_for(lambda: worker.free_mib() == 1000 - 2 * CONTEXT_MIB)


def test_what_is_allocated_while_nvml_is_read_is_not_taken_for_a_context(measured: Stage) -> None:
    worker = measured.worker()
    least = 1000
    for _ in range(300):
        ats = [worker.must("alloc(10)") for _ in range(40)]
        least = min(least, worker.free_mib())
        for at in ats:
            worker.must(f"free({at})")
    assert least == 1000 - CONTEXT_MIB - 400
    assert measured.status().gpus[0].context_bytes == CONTEXT_MIB * MIB


def test_the_context_of_a_killed_process_is_free(measured: Stage) -> None:
    one, two = measured.worker(), measured.worker()
    assert two.free_mib() <= 1000 - 2 * CONTEXT_MIB
    one.kill()
    wait_for(lambda: two.free_mib() == 1000 - CONTEXT_MIB)


def test_processes_that_start_at_once_get_only_the_contexts_that_fit(measured: Stage) -> None:
    workers = [measured.bare_worker() for _ in range(8)]
    for worker in workers:
        worker.start("use()")
    codes = [worker.finish()[0] for worker in workers]
    assert codes.count(0) == 1000 // CONTEXT_MIB
    assert set(codes) == {0, OUT_OF_MEMORY}
    assert measured.true_mib(*workers) <= 1000


def test_initialising_the_driver_takes_nothing(measured: Stage) -> None:
    worker = measured.worker()
    measured.bare_worker().must("initialise()")
    wait_for(lambda: len(measured.status().processes) == 2)
    assert measured.status().gpus[0].context_bytes == CONTEXT_MIB * MIB
    worker.must(f"alloc({1000 - CONTEXT_MIB})")  # it waits until the other's reservation has ended


def test_the_first_allocation_does_not_wait(own_measured: Stage) -> None:
    worker = own_measured.worker()
    assert worker.free_mib() == 1000 - CONTEXT_MIB
    own_measured.signal_arbiter(signal.SIGSTOP)
    worker.must("alloc(10)")
    own_measured.signal_arbiter(signal.SIGCONT)


def test_a_process_that_allocates_nothing_gives_its_first_chunk_back(measured: Stage) -> None:
    worker = measured.worker()
    wait_for(lambda: measured.status().gpus[0].leased_bytes == 0)
    fills(worker, 1000 - CONTEXT_MIB)


def left_behind(stage: Stage) -> tuple[Worker, Worker, int]:
    """A process that released its block of 200 MiB, another process, and the handle by which that one still has the block."""
    owner, guest = stage.worker(), stage.worker()
    block = owner.must("create(200, 0, 1)")
    _, pid, fd = owner.request(f"export_block({block})")
    handle = guest.must(f"import_block({pid}, {fd})")
    owner.must(f"release({block})")
    return owner, guest, handle


def test_a_block_that_lives_on_where_it_is_not_mapped_is_charged_before_its_maker_lets_go(measured: Stage) -> None:
    owner, guest, handle = left_behind(measured)
    (gpu,) = measured.status().gpus
    assert gpu.leased_bytes + gpu.context_bytes >= (2 * CONTEXT_MIB + 400) * MIB, "its maker may have 200 anew"
    guest.must(f"release({handle})")
    owner.must("alloc(300)")


def test_a_block_that_is_mapped_after_its_maker_let_go_comes_free_with_its_last_release(measured: Stage) -> None:
    owner, guest, handle = left_behind(measured)
    at = guest.must(f"map_block({handle}, 200)")
    guest.must(f"unmap({at}, 200)")
    guest.must(f"release({handle})")
    owner.must("alloc(300)")


def test_a_restarted_arbiter_leases_no_memory_that_contexts_use(own_measured: Stage) -> None:
    one, two = own_measured.worker(), own_measured.worker()
    one.must("alloc(100)")
    own_measured.stop_arbiter(another=True)
    own_measured.start_measuring_arbiter()
    held = (100 * MIB, 2 * CONTEXT_MIB * MIB)

    def both_are_back() -> bool:
        gpu = own_measured.status().gpus[0]
        return gpu.leased_bytes >= held[0] and gpu.context_bytes == held[1]

    wait_for(both_are_back, 60)  # the arbiter itself waits for them for its grace only
    left = 1000 - 2 * CONTEXT_MIB - 100
    assert two.request(f"alloc({left + 1})")[0] == OUT_OF_MEMORY
    two.must(f"alloc({left})")
    assert own_measured.true_mib(one, two) == 1000


def test_without_nvml_leases_go_on_and_contexts_are_unknown(bare_stage: Stage) -> None:
    bare_stage.grant((GPUS[0], 1000))
    bare_stage.start_arbiter("--driver-root", "/nonexistent", "--grace-ms", "0")
    worker = bare_stage.worker()
    fills(worker, 1000)
    wait_for(lambda: any("contexts are not measured" in line for line in bare_stage.arbiter_log))
    (process,) = bare_stage.status().processes
    assert process.gpus[0].measured_bytes is None

"""Pools and memory in a stream's order: charged for what the driver reserves, until the driver has freed it.

The container of these tests has 1000 MiB of the first GPU. `true_mib` is the driver's own count of the process.
"""

from __future__ import annotations

import pytest

from tests.integration.shim.conftest import GPUS, INVALID_VALUE, OUT_OF_MEMORY, Stage

SUFFIXES = ("", "_ptsz")


def test_a_pool_that_keeps_what_is_freed_stays_charged_for_it(stage: Stage) -> None:
    gpu = stage.worker()
    pool = gpu.must("pool_of()")
    gpu.must(f"pool_keep({pool}, 4000)")
    at = gpu.must("stream_alloc(900)")
    gpu.must(f"stream_free({at})")
    gpu.must("context_sync()")
    assert stage.true_mib(gpu) == 900, "the release threshold keeps it"
    assert gpu.free_mib() == 100
    assert stage.worker().request("alloc(200)")[0] == OUT_OF_MEMORY
    assert gpu.request("stream_alloc(500)")[0] == 0, "the pool has it still"
    assert (stage.true_mib(gpu), gpu.free_mib()) == (900, 100), "and was not trimmed for it"


@pytest.mark.parametrize("sync", ["stream_sync()", "stream_sync(0, '_ptsz')", "context_sync()", "event_sync()"])
def test_a_synchronisation_that_shrinks_the_pool_gives_the_memory_back(stage: Stage, sync: str) -> None:
    gpu = stage.worker()
    at = gpu.must("stream_alloc(900)")
    gpu.must(f"stream_free({at})")
    assert (stage.true_mib(gpu), gpu.free_mib()) == (900, 100), (
        "not yet: the driver has it until the next synchronisation"
    )
    gpu.must(sync)
    assert (stage.true_mib(gpu), gpu.free_mib()) == (0, 1000)


def test_a_pool_is_charged_for_what_it_reserves_and_not_for_what_was_requested(stage: Stage) -> None:
    gpu = stage.worker()
    gpu.must("stream_alloc(0.25)")
    assert (stage.true_mib(gpu), gpu.free_mib()) == (2, 998)


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_pool_of_the_programs_own_is_charged_trimmed_and_destroyed(stage: Stage, suffix: str) -> None:
    gpu = stage.worker()
    pool = gpu.must("pool_new()")
    gpu.must(f"pool_keep({pool}, 4000)")
    at = [gpu.must(f"pool_alloc(300, {pool}, 0, '{suffix}')") for _ in range(3)]
    assert gpu.request(f"pool_alloc(300, {pool}, 0, '{suffix}')")[0] == OUT_OF_MEMORY
    for one in at[:2]:
        gpu.must(f"stream_free({one}, 0, '{suffix}')")
    gpu.must("context_sync()")
    assert (stage.true_mib(gpu), gpu.free_mib()) == (900, 100)
    gpu.must(f"pool_trim({pool}, 600)")
    assert (stage.true_mib(gpu), gpu.free_mib()) == (600, 400)
    gpu.must(f"pool_trim({pool})")
    assert (stage.true_mib(gpu), gpu.free_mib()) == (300, 700)
    gpu.must(f"stream_free({at[2]}, 0, '{suffix}')")
    gpu.must(f"pool_end({pool})")
    gpu.must("context_sync()")
    assert (stage.true_mib(gpu), gpu.free_mib()) == (0, 1000)


def test_a_destroyed_pool_is_charged_until_its_last_pointer_is_freed(stage: Stage) -> None:
    gpu = stage.worker()
    pool = gpu.must("pool_new()")
    gpu.must(f"pool_keep({pool}, 4000)")
    at, idle = (gpu.must(f"pool_alloc({mib}, {pool})") for mib in (600, 300))
    gpu.must(f"stream_free({idle})")
    gpu.must(f"pool_end({pool})")
    gpu.must("context_sync()")
    assert gpu.free_mib() == 400, "the driver keeps what is still in use, and no more"
    gpu.must(f"stream_free({at})")
    gpu.must("context_sync()")
    assert gpu.free_mib() == 1000


def test_idle_memory_of_a_pool_is_returned_for_other_memory(stage: Stage) -> None:
    gpu = stage.worker()
    pool = gpu.must("pool_of()")
    gpu.must(f"pool_keep({pool}, 4000)")
    at = gpu.must("stream_alloc(900)")
    gpu.must(f"stream_free({at})")
    gpu.must("context_sync()")
    assert gpu.request("alloc(500)")[0] == 0
    assert stage.true_mib(gpu) == 500


def test_a_pool_chosen_for_the_device_is_the_one_that_pays(stage: Stage) -> None:
    gpu = stage.worker()
    pool = gpu.must("pool_new()")
    gpu.must(f"pool_keep({pool}, 4000)")
    gpu.must(f"pool_choose({pool})")
    at = gpu.must("stream_alloc(900)")
    gpu.must(f"stream_free({at})")
    gpu.must("context_sync()")
    assert gpu.free_mib() == 100
    gpu.must(f"pool_trim({pool})")
    assert gpu.free_mib() == 1000


def test_a_pool_on_another_gpu_is_charged_to_that_gpu(stage: Stage) -> None:
    stage.grant((GPUS[0], 1000), (GPUS[1], 100))
    gpu = stage.worker(device=0)
    pool = gpu.must("pool_new(1)")
    assert gpu.request(f"pool_alloc(200, {pool})")[0] == OUT_OF_MEMORY
    gpu.must(f"pool_alloc(100, {pool})")
    assert gpu.free_mib() == 1000, "the first GPU has nothing"


@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.parametrize("location", [1, 0], ids=["of a device", "without a place"])
def test_managed_memory_of_a_default_pool_is_charged_as_far_as_the_pool_has_it(
    stage: Stage, location: int, suffix: str
) -> None:
    gpu = stage.worker()
    pool = gpu.must(f"pool_default({location}, 2)")
    assert gpu.must(f"pool_default({location}, 2, 0, 'cuMemGetMemPool')") == pool
    at = gpu.must(f"pool_alloc(900, {pool}, 0, '{suffix}')")
    assert (stage.true_mib(gpu), gpu.free_mib()) == (900, 100)
    assert gpu.request(f"pool_alloc(200, {pool}, 0, '{suffix}')")[0] == OUT_OF_MEMORY
    assert stage.worker().request("alloc(200)")[0] == OUT_OF_MEMORY
    gpu.must(f"stream_free({at})")
    gpu.must("context_sync()")
    assert (stage.true_mib(gpu), gpu.free_mib()) == (0, 1000)


def test_managed_memory_of_another_gpus_default_pool_is_charged_to_that_gpu(stage: Stage) -> None:
    stage.grant((GPUS[0], 1000), (GPUS[1], 100))
    gpu = stage.worker()
    pool = gpu.must("pool_default(1, 2, 1)")
    assert gpu.request(f"pool_alloc(200, {pool})")[0] == OUT_OF_MEMORY
    gpu.must(f"pool_alloc(100, {pool})")
    assert gpu.free_mib() == 1000


def test_memory_of_the_hosts_default_pool_is_not_counted(stage: Stage) -> None:
    gpu = stage.worker()
    pool = gpu.must("pool_default(2, 1)")
    gpu.must(f"pool_alloc(3000, {pool})")
    assert (stage.true_mib(gpu), gpu.free_mib()) == (0, 1000)


def test_a_pool_whose_payer_cannot_be_reported_allocates_nothing(stage: Stage) -> None:
    maker, gpu = stage.worker(), stage.worker()
    pool = maker.must("pool_new(handles=1)")
    at = maker.must(f"pool_alloc(100, {pool})")
    _, pid, fd, _ = maker.request(f"pool_export({pool}, {at})")
    imported = gpu.must(f"pool_open({pid}, {fd})")
    assert gpu.request(f"pool_alloc(10, {imported})")[0] == INVALID_VALUE
    gpu.must(f"pool_end({imported})")


def test_a_stream_of_another_gpu_allocates_from_that_gpus_pool(stage: Stage) -> None:
    stage.grant((GPUS[0], 1000), (GPUS[1], 100))
    gpu = stage.worker(device=1)
    stream = gpu.must("stream_new()")
    gpu.must("use(0)")
    assert gpu.request(f"stream_alloc(200, {stream})")[0] == OUT_OF_MEMORY
    gpu.must(f"stream_alloc(100, {stream})")
    assert gpu.free_mib() == 1000


def test_plain_memory_freed_in_a_streams_order_is_charged_until_the_stream_is_there(stage: Stage) -> None:
    gpu = stage.worker()
    stream = gpu.must("stream_new()")
    at = gpu.must("alloc(900)")
    gpu.must(f"busy(300, {stream})")
    gpu.must(f"stream_free({at}, {stream})")
    assert gpu.request("alloc(500)")[0] == OUT_OF_MEMORY, "the kernel before the free may still use it"
    assert gpu.free_mib() == 100
    gpu.must(f"stream_sync({stream})")
    assert gpu.free_mib() == 1000


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_plain_memory_may_be_freed_in_a_streams_order(stage: Stage, suffix: str) -> None:
    gpu = stage.worker()
    for _ in range(3):
        at = gpu.must("alloc(900)")
        gpu.must(f"stream_free({at}, 0, '{suffix}')")
        gpu.must("context_sync()")
    assert (stage.true_mib(gpu), gpu.free_mib()) == (0, 1000)


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_stream_ordered_memory_is_refused_with_out_of_memory(stage: Stage, suffix: str) -> None:
    gpu = stage.worker()
    assert gpu.request(f"stream_alloc(1001, 0, '{suffix}')")[0] == OUT_OF_MEMORY
    assert gpu.request(f"stream_alloc(1000, 0, '{suffix}')")[0] == 0
    assert gpu.request(f"stream_alloc(1, 0, '{suffix}')")[0] == OUT_OF_MEMORY


SLOW = "hang cuMemAllocAsync seconds=1"


def test_memory_that_is_allocated_while_a_capture_ends_is_charged(stage: Stage) -> None:
    """It was to be a node of the graph when the library looked, and is memory."""
    gpu = stage.worker(TANGRAM_FAKE_FAULTS=SLOW)
    rc, at, stream = gpu.request("__import__('captures').ended(300)")
    assert rc == 0
    assert (stage.true_mib(gpu), gpu.free_mib()) == (300, 700)
    gpu.must(f"stream_free({at}, {stream})")
    gpu.must(f"stream_sync({stream})")
    assert gpu.free_mib() == 1000


def test_memory_that_does_not_fit_is_not_had_by_a_capture_that_ends(stage: Stage) -> None:
    gpu = stage.worker(TANGRAM_FAKE_FAULTS=SLOW)
    assert gpu.request("__import__('captures').ended(2000)")[0] == OUT_OF_MEMORY
    assert (stage.true_mib(gpu), gpu.free_mib()) == (0, 1000)


def test_a_capture_that_begins_while_memory_is_allocated_takes_none(stage: Stage) -> None:
    gpu = stage.worker(TANGRAM_FAKE_FAULTS=SLOW)
    assert gpu.request("__import__('captures').begun(300)")[0] == 0
    assert (stage.true_mib(gpu), gpu.free_mib()) == (0, 1000)


def test_an_error_of_the_event_gives_no_memory_back_that_a_stream_still_uses(stage: Stage) -> None:
    gpu = stage.worker(TANGRAM_FAKE_FAULTS="fail cuEventQuery nth=1 error=999")
    stream = gpu.must("stream_new()")
    at = gpu.must("alloc(900)")
    gpu.must(f"busy(300, {stream})")
    gpu.must(f"stream_free({at}, {stream})")
    assert gpu.request("alloc(500)")[0] == OUT_OF_MEMORY
    assert gpu.free_mib() == 100
    gpu.must(f"stream_sync({stream})")
    assert gpu.free_mib() == 1000

"""Stream-ordered memory of a container that may burst: served from blocks that can be swapped, and to the program what the driver's pools are.

The same calls go to a program with elastic memory and to one without the library's part in it. The container has 1000 MiB of the one GPU that it sees.
"""

from __future__ import annotations

import random

import pytest

from tests.integration.shim.burst_kit import bursting_node, elastic, is_elastic, plain
from tests.integration.shim.burst_kit import bursting_stage as stage
from tests.integration.shim.conftest import GPUS, INVALID_VALUE, MIB, OUT_OF_MEMORY, Stage, Worker, wait_for
from tests.integration.shim.test_random import Program
from vgpu.api.codec import grant_to_text
from vgpu.api.grant import Grant, GrantGpu

__all__ = ["bursting_node", "stage"]

INVALID_HANDLE = 400
NOT_READY = 600
FOLLOW, OPPORTUNISTIC, INTERNAL, THRESHOLD, RESERVED, RESERVED_HIGH, USED, USED_HIGH = range(1, 9)
MOST = 2**64 - 1


def reserved_mib(gpu: Worker, pool: int) -> int:
    return int(gpu.must(f"pool_get({pool}, {RESERVED})")) // MIB


def idle(gpu: Worker, stream: int) -> bool:
    return gpu.must(f"stream_state({stream})") == 0


POOLS = {
    "the default pool": ("pool_of()", True),
    "a pool of the program's": ("pool_new()", True),
    "a pool that can be exported": ("pool_new(handles=1)", False),
    "a pool of managed memory": ("pool_new(0, 2)", False),
}


@pytest.mark.parametrize("which", POOLS)
def test_memory_of_a_pool_is_elastic_unless_others_may_have_it(which: str, stage: Stage) -> None:
    expression, swaps = POOLS[which]
    gpu = elastic(stage)
    pool = gpu.must(expression)
    assert is_elastic(gpu, gpu.must(f"pool_alloc(10, {pool})")) == swaps


def test_without_bursts_stream_ordered_memory_is_the_drivers(stage: Stage) -> None:
    gpu = plain(stage)
    assert not is_elastic(gpu, gpu.must("stream_alloc(10)"))


def test_memory_that_is_allocated_under_capture_is_a_node_of_the_graph(stage: Stage) -> None:
    gpu = elastic(stage)
    stream = gpu.must("stream_new()")
    gpu.must(f"capture({stream})")
    at = gpu.must(f"stream_alloc(10, {stream})")
    graph = gpu.must(f"captured({stream})")
    gpu.must(f"graph_run({gpu.must(f'graph_ready({graph})')}, {stream})")
    gpu.must(f"stream_sync({stream})")
    assert not is_elastic(gpu, at)


# The same as the driver's.

POINTER = (
    "CONTEXT", "MEMORY_TYPE", "DEVICE_ORDINAL", "IS_MANAGED", "MAPPED", "ALLOWED_HANDLE_TYPES", "ACCESS_FLAGS", "RANGE_SIZE",
    "IS_LEGACY_CUDA_IPC_CAPABLE",
)  # fmt: skip


def answers(gpu: Worker) -> dict[str, object]:
    """What a program sees, by name; addresses and handles are not in it."""
    pool, stream = gpu.must("pool_new()"), gpu.must("stream_new()")
    at = gpu.must(f"pool_bytes(3000, {pool}, {stream})")
    second = gpu.must(f"pool_bytes({5 * MIB + 100}, {pool}, {stream})")
    seen: dict[str, object] = {
        "attributes": [gpu.request(f"attributes({at + 5}, '{name}')") for name in POINTER],
        "its pool": gpu.must(f"attributes({at}, 'MEMPOOL_HANDLE')")[0] == pool,
        "its range": gpu.request(f"range_of({at + 7})")[2],
        "used": gpu.request(f"pool_get({pool}, {USED})"),
        "used high": gpu.request(f"pool_get({pool}, {USED_HIGH})"),
        "settable": [
            gpu.request(f"pool_get({pool}, {number})") for number in (FOLLOW, OPPORTUNISTIC, INTERNAL, THRESHOLD)
        ],
        "high set to 1": gpu.request(f"pool_set({pool}, {USED_HIGH}, 1)"),
        "used set": gpu.request(f"pool_set({pool}, {USED}, 0)"),
        "no such attribute": gpu.request(f"pool_get({pool}, 99)"),
        "export of the pool": gpu.request(f"pool_handle({pool})"),
        "export of the pointer": gpu.request(f"pool_name({at})"),
        "a handle of the pointer": gpu.request(f"ipc_get({at})")[0],
        "retained": gpu.request(f"retain({at})")[0],
        "own access": gpu.request(f"pool_access({pool})"),
        "access": gpu.request(f"pool_access_of({pool})"),
        "destroying the default pool": gpu.request(f"pool_end({gpu.must('pool_of()')})")[0],
        "0 bytes": gpu.request(f"pool_bytes(0, {pool}, {stream})"),
        "too much": gpu.request(f"pool_bytes({1 << 50}, {pool}, {stream})")[0],
        "nowhere": gpu.request(f"pool_nowhere({pool})"),
        "no such stream": gpu.request(f"pool_bytes(512, {pool}, {pool})")[0],
        "a free in no stream": gpu.request(f"stream_free({at}, {pool})"),
        "a free inside": gpu.request(f"stream_free({at + 512}, {stream})"),
    }
    seen["free"] = gpu.request(f"stream_free({at}, {stream})")
    seen["free again"] = gpu.request(f"stream_free({at}, {stream})")
    gpu.must(f"stream_sync({stream})")
    seen["used after it"] = gpu.request(f"pool_get({pool}, {USED})")
    seen["high after it"] = gpu.request(f"pool_get({pool}, {USED_HIGH})")
    seen["high reset"] = gpu.request(f"pool_set({pool}, {USED_HIGH}, 0)") + gpu.request(
        f"pool_get({pool}, {USED_HIGH})"
    )
    seen["cuMemFree"] = gpu.request(f"free({second})")
    seen["cuMemFree again"] = gpu.request(f"free({second})")
    gpu.must("context_sync()")
    seen["reserved at the end"] = gpu.request(f"pool_get({pool}, {RESERVED})")
    third = gpu.must(f"pool_bytes(100, {pool}, {stream})")
    seen["destroyed"] = gpu.request(f"pool_end({pool})")
    seen["free of a pool that is gone"] = gpu.request(f"stream_free({third}, {stream})")
    seen["plain memory in a stream's order"] = gpu.request(f"stream_free({gpu.must('alloc(1)')}, {stream})")
    return seen


def test_a_program_sees_what_it_sees_of_the_drivers_pools(stage: Stage) -> None:
    native, ours = answers(plain(stage)), answers(elastic(stage))
    assert ours == native


STREAMS = 3


def random_calls(gpu: Worker, seed: int) -> list[object]:
    """The results of random calls of one program; where results may differ, as what is reserved may, they are not in it."""
    dice = random.Random(seed)
    pools = [gpu.must("pool_of()"), gpu.must("pool_new()")]
    streams = [0, *(gpu.must("stream_new()") for _ in range(STREAMS - 1))]
    held: list[int] = []
    seen: list[object] = []
    for _ in range(150):
        what, stream, pool = dice.randrange(12), dice.choice(streams), dice.choice(pools)
        size = dice.choice((1, 600, 100_000, 3 * MIB, 20 * MIB, dice.randrange(1, 8 * MIB)))
        if what < 5:
            code, at = gpu.request(f"pool_bytes({size}, {pool}, {stream})")
            seen.append(code)
            held.append(at)
        elif what < 8 and held:
            seen.append(gpu.request(f"stream_free({held.pop(dice.randrange(len(held)))}, {stream})"))
        elif what == 8 and held:
            seen.append(gpu.request(f"free({held.pop(dice.randrange(len(held)))})"))
        elif what == 9:
            seen.append(gpu.request(f"pool_trim({pool}, {dice.randrange(30)})"))
        elif what == 10:
            seen.append(gpu.request(f"pool_set({pool}, {THRESHOLD}, {dice.choice((0, 10 * MIB, MOST))})"))
        else:
            gpu.must("context_sync()")
            seen.extend(gpu.request(f"pool_get({one}, {USED})") for one in pools)
            seen.append(
                all(gpu.must(f"pool_get({one}, {RESERVED})") >= gpu.must(f"pool_get({one}, {USED})") for one in pools)
            )
    seen.extend(gpu.request(f"stream_free({at})") for at in held)
    for pool in pools:
        gpu.must(f"pool_set({pool}, {THRESHOLD}, 0)")
    gpu.must("context_sync()")
    seen.extend(gpu.request(f"pool_get({one}, {which})") for one in pools for which in (USED, RESERVED))
    return seen


@pytest.mark.parametrize("seed", range(6))
def test_random_calls_are_answered_as_the_driver_answers_them(stage: Stage, seed: int) -> None:
    assert random_calls(elastic(stage), seed) == random_calls(plain(stage), seed)


# Reuse.


def busy_streams(gpu: Worker) -> tuple[int, int]:
    """Two of which the first has work for a while."""
    first, second = gpu.must("stream_new()"), gpu.must("stream_new()")
    gpu.must(f"busy(1, {first})")
    gpu.must(f"stream_sync({first})")  # what the kernel needs is loaded
    gpu.must(f"busy(3000, {first})")
    return first, second


def test_the_same_stream_has_memory_again_at_once_and_another_when_the_free_has_happened(stage: Stage) -> None:
    gpu = elastic(stage)
    first, second = busy_streams(gpu)
    at = gpu.must(f"stream_alloc(10, {first})")
    gpu.must(f"stream_free({at}, {first})")
    assert gpu.must(f"stream_alloc(4, {first})") == at
    gpu.must(f"stream_free({at}, {first})")
    other = gpu.must(f"stream_alloc(10, {second})")
    assert other != at
    assert not idle(gpu, first), "the kernel ended too early to show anything"
    wait_for(lambda: idle(gpu, first))
    assert gpu.must(f"stream_alloc(10, {second})") == at


def test_a_stream_that_gets_the_handle_of_a_destroyed_one_does_not_get_its_memory(stage: Stage) -> None:
    gpu = elastic(stage)
    first, _ = busy_streams(gpu)
    at = gpu.must(f"stream_alloc(10, {first})")
    gpu.must(f"stream_free({at}, {first})")
    gpu.must(f"stream_end({first})")
    again = gpu.must("stream_new()")
    assert again == first, "the driver gave another handle: this shows nothing"
    assert gpu.must(f"stream_alloc(10, {again})") != at


def test_a_stream_waits_for_memory_of_another_before_the_limit_refuses_it(stage: Stage) -> None:
    gpu = elastic(stage)
    first, second = busy_streams(gpu)
    at = gpu.must(f"stream_alloc(600, {first})")
    gpu.must(f"stream_free({at}, {first})")
    assert gpu.must(f"stream_alloc(600, {second})") == at
    assert not idle(gpu, second), "it has to come after the free"
    gpu.must(f"pool_set(pool_of()[1], {INTERNAL}, 0)")
    gpu.must(f"stream_free({at}, {second})")
    assert gpu.request(f"stream_alloc(600, {first})")[0] == OUT_OF_MEMORY
    gpu.must("context_sync()")
    gpu.must(f"stream_alloc(600, {first})")


def test_a_pool_that_does_not_allow_it_has_no_memory_that_is_only_free_by_chance(stage: Stage) -> None:
    gpu = elastic(stage)
    gpu.must(f"pool_set(pool_of()[1], {OPPORTUNISTIC}, 0)")
    gpu.must(f"pool_set(pool_of()[1], {THRESHOLD}, {MOST})")
    first, second = gpu.must("stream_new()"), gpu.must("stream_new()")
    at = gpu.must(f"stream_alloc(10, {first})")
    gpu.must(f"stream_free({at}, {first})")
    assert gpu.must(f"stream_alloc(10, {second})") != at
    gpu.must("context_sync()")
    assert gpu.must(f"stream_alloc(10, {second})") == at


# What a pool reserves.


def test_a_pool_releases_at_a_synchronisation_what_is_above_its_threshold(stage: Stage) -> None:
    gpu = elastic(stage)
    pool = gpu.must("pool_new()")
    pieces = [gpu.must(f"pool_alloc(40, {pool})") for _ in range(4)]
    before_mib, free_mib = stage.true_mib(gpu), gpu.free_mib()
    gpu.must(f"pool_keep({pool}, 80)")
    for at in pieces:
        gpu.must(f"stream_free({at})")
    assert reserved_mib(gpu, pool) == 160
    gpu.must("stream_sync()")
    assert reserved_mib(gpu, pool) == 80
    assert (stage.true_mib(gpu), gpu.free_mib()) == (before_mib - 80, free_mib + 80)
    gpu.must(f"pool_trim({pool}, 41)")
    assert reserved_mib(gpu, pool) == 80, "no less than 41 stay"
    gpu.must(f"pool_trim({pool}, 0)")
    assert (reserved_mib(gpu, pool), stage.true_mib(gpu)) == (0, before_mib - 160)


def test_what_is_idle_in_a_pool_is_released_for_other_memory(stage: Stage) -> None:
    gpu = elastic(stage)
    pool = gpu.must("pool_new()")
    gpu.must(f"pool_keep({pool}, 4000)")
    gpu.must(f"stream_free({gpu.must(f'pool_alloc(700, {pool})')})")
    gpu.must("context_sync()")
    gpu.must("alloc(700)")
    assert reserved_mib(gpu, pool) == 0
    assert gpu.request(f"pool_alloc(400, {pool})")[0] == OUT_OF_MEMORY


def test_requests_of_growing_size_do_not_add_up(stage: Stage) -> None:
    """A pool that keeps everything, as PyTorch's: what is too small for a request is released for it."""
    gpu = elastic(stage)
    pool = gpu.must("pool_new()")
    gpu.must(f"pool_keep({pool}, 4000)")
    for mib in range(40, 400, 20):
        gpu.must(f"stream_free({gpu.must(f'pool_alloc({mib}, {pool})')})")
    assert reserved_mib(gpu, pool) < 400


def test_memory_of_a_destroyed_pool_is_charged_until_it_is_freed(stage: Stage) -> None:
    gpu = elastic(stage)
    pool = gpu.must("pool_new()")
    at, before_mib = gpu.must(f"pool_alloc(300, {pool})"), gpu.free_mib()
    gpu.must(f"pool_end({pool})")
    assert gpu.free_mib() == before_mib
    assert is_elastic(gpu, at)
    gpu.must(f"stream_free({at})")
    gpu.must("stream_sync()")
    assert gpu.free_mib() == before_mib + 300
    assert gpu.request(f"stream_free({at})")[0] == INVALID_VALUE


def test_memory_of_a_pool_outlives_its_context(stage: Stage) -> None:
    gpu = elastic(stage)
    context = gpu.must("context_new()")
    at = gpu.must("stream_alloc(50)")
    gpu.must("stream_free(stream_alloc(30)[1])")
    gpu.must(f"context_end({context})")
    assert is_elastic(gpu, at)
    gpu.must(f"free({at})")
    gpu.must("context_sync()")
    assert gpu.must(f"pool_get(pool_of()[1], {RESERVED})") == 0


def test_a_pool_that_is_opened_to_another_place_is_the_drivers_from_then_on(stage: Stage) -> None:
    gpu = elastic(stage)
    pool = gpu.must("pool_new()")
    at = gpu.must(f"pool_alloc(10, {pool})")
    assert gpu.request(f"pool_access({pool}, 2)")[0] == 801
    gpu.must(f"stream_free({at})")
    gpu.must("stream_sync()")
    gpu.must(f"pool_access({pool}, 2)")
    assert not is_elastic(gpu, gpu.must(f"pool_alloc(10, {pool})"))
    assert "was to be opened to a place that is no GPU: cuMemPoolSetAccess fails" in gpu.end()


def test_reused_memory_is_zeroed_in_order_where_the_grant_requests_it(stage: Stage) -> None:
    stage.write_grant(grant_to_text(Grant("default", "a", "1", "main", (GrantGpu(GPUS[0], 1000),), clear=True)))
    gpu = elastic(stage)
    for mib in (4, 0.5):
        at = gpu.must(f"stream_alloc({mib})")
        gpu.must(f"fill({at}, {mib}, 7)")
        gpu.must(f"stream_free({at})")
        assert gpu.must(f"stream_alloc({mib})") == at
        assert set(bytes.fromhex(gpu.must(f"bytes_at({at}, 4096)"))) == {0}


@pytest.mark.parametrize("seed", range(3))
def test_processes_with_memory_of_every_kind_never_exceed_the_limit(stage: Stage, seed: int) -> None:
    dice = random.Random(seed)
    programs = [Program(elastic(stage), dice) for _ in range(3)]
    workers = [program.worker for program in programs]
    full = 0
    for number in range(400):
        dice.choice(programs).step()
        if number % 4 == 0:
            used = stage.true_mib(*workers)
            full = max(full, used)
            assert used <= 1000, f"seed {seed}, step {number}"
    assert full > 600, "a test that never comes near the limit shows nothing"
    for program in programs:
        program.give_all_back()
        program.worker.must("context_sync()")
    for worker in workers:
        assert worker.must(f"pool_get(pool_of()[1], {RESERVED})") == 0
    code, at = workers[0].request("stream_alloc(900)")
    assert (code, is_elastic(workers[0], at)) == (0, True), (
        "nothing stays counted, but what others keep until it is needed"
    )

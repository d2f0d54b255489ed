"""Memory of a container that may burst: served from blocks that can be swapped, and to the program what cuMemAlloc always was.

The containers: burst_kit.py.
"""

from __future__ import annotations

import itertools
import random
import re
import subprocess

import pytest

from tests.integration.shim.burst_kit import ANCHOR_MIB, SAME, burst, bursting_node, elastic, is_elastic, plain, worker
from tests.integration.shim.burst_kit import bursting_stage as stage
from tests.integration.shim.conftest import GPUS, INVALID_VALUE, MIB, OUT_OF_MEMORY, Stage, Worker, wait_for
from vgpu.api.codec import grant_to_text
from vgpu.api.grant import Grant, GrantGpu

__all__ = ["bursting_node", "stage"]


def test_memory_is_elastic_only_where_the_container_may_burst(stage: Stage) -> None:
    gpu, other = elastic(stage), plain(stage)
    assert is_elastic(gpu, gpu.must("alloc(10)"))
    assert not is_elastic(other, other.must("alloc(10)"))


def test_it_is_charged_by_whole_blocks_and_the_rest_of_a_block_costs_nothing(stage: Stage) -> None:
    gpu = elastic(stage)
    gpu.must("alloc(100)")
    assert (stage.true_mib(gpu), gpu.free_mib()) == (100 + ANCHOR_MIB, 900 - ANCHOR_MIB)
    for _ in range(4):
        gpu.must("alloc(0.5)")
    assert (stage.true_mib(gpu), gpu.free_mib()) == (102 + ANCHOR_MIB, 898 - ANCHOR_MIB), "small requests share a block"
    gpu.must("alloc(0.5)")
    assert (stage.true_mib(gpu), gpu.free_mib()) == (104 + ANCHOR_MIB, 896 - ANCHOR_MIB)


def region_mib(gpu: Worker, at: int) -> int:
    """Of the region that an address is in."""
    return int(gpu.must(f"attributes({at}, 'MAPPING_SIZE')")[0]) // MIB


@pytest.mark.parametrize(("mib", "large"), [(2, 110), (20, 120), (32, 128), (34, 34)])
def test_requests_of_up_to_32_mib_share_regions_that_grow_with_what_there_is(
    stage: Stage, mib: int, large: int
) -> None:
    stage.grant((GPUS[0], 2200))
    gpu = elastic(stage)
    pieces, regions = [gpu.must(f"alloc({mib})")], []
    while len(pieces) * mib < (1000 if mib < 32 else 1900):
        pieces.append(gpu.must(f"alloc({mib})"))
        regions.append(region_mib(gpu, pieces[-1]))
        taken = stage.true_mib(gpu) - ANCHOR_MIB
        assert taken - len(pieces) * mib <= taken / 8, "an eighth is free at most"
    assert regions[0] == mib, "a small process has small regions"
    assert max(regions) >= large
    assert max(regions) <= max(mib, 128)
    for at in pieces:
        gpu.must(f"free({at})")
    assert gpu.free_mib() == 2200 - ANCHOR_MIB, "regions without a request are free"
    gpu.must("alloc(2100)")


def test_requests_that_share_regions_get_all_of_the_limit(stage: Stage) -> None:
    gpu = elastic(stage)
    pieces = []
    while (answer := gpu.request("alloc(20)"))[0] == 0:
        pieces.append(answer[1])
    assert len(pieces) == (1000 - ANCHOR_MIB) // 20
    assert stage.true_mib(gpu) == 20 * len(pieces) + ANCHOR_MIB


def test_all_of_the_limit_can_be_had_and_not_a_page_more(stage: Stage) -> None:
    gpu = elastic(stage)
    assert gpu.request("alloc(1001)")[0] == OUT_OF_MEMORY
    at = gpu.must("alloc(1000)")
    assert stage.true_mib(gpu) == 1000, "there is no room for an anchor"
    assert gpu.request("alloc(0.001)")[0] == OUT_OF_MEMORY
    gpu.must(f"free({at})")
    gpu.must("alloc(1000)")


def test_what_is_freed_is_kept_for_the_next_request_and_free_for_any_other(stage: Stage) -> None:
    gpu = elastic(stage)
    at = gpu.must("alloc(600)")
    gpu.must(f"free({at})")
    assert (stage.true_mib(gpu), gpu.free_mib()) == (600 + ANCHOR_MIB, 1000 - ANCHOR_MIB), "kept, and free"
    assert gpu.must("alloc(600)") == at
    gpu.must(f"free({at})")
    gpu.must("alloc(500)")
    assert stage.true_mib(gpu) == 500 + ANCHOR_MIB, "600 MiB are kept no longer: 500 more did not fit beside them"
    assert gpu.free_mib() == 500 - ANCHOR_MIB


def test_other_memory_gets_what_is_kept(stage: Stage) -> None:
    gpu = elastic(stage)
    gpu.must(f"free({gpu.must('alloc(900)')})")
    gpu.must("managed(900)")
    assert gpu.free_mib() == 100 - ANCHOR_MIB


def test_a_sibling_gets_what_is_kept(stage: Stage) -> None:
    gpu, sibling = elastic(stage), elastic(stage)
    gpu.must(f"free({gpu.must('alloc(900)')})")
    sibling.must("alloc(900)")
    assert (stage.true_mib(gpu), stage.true_mib(sibling)) == (ANCHOR_MIB, 900 + ANCHOR_MIB)


def test_what_is_kept_and_not_needed_goes_back_in_a_second_or_two(stage: Stage) -> None:
    gpu = elastic(stage)
    gpu.must(f"free({gpu.must('alloc(600)')})")
    wait_for(lambda: stage.true_mib(gpu) == ANCHOR_MIB)


def test_the_arbiter_and_the_driver_count_alike(stage: Stage) -> None:
    gpu = elastic(stage)
    for mib in (100, 0.25, 33, 512, 2):
        gpu.must(f"alloc({mib})")
    held = stage.true_mib(gpu)
    assert held == 1000 - gpu.free_mib()
    wait_for(lambda: stage.status().gpus[0].used_bytes == held * MIB)


def test_a_container_that_bursts_no_more_keeps_what_it_has_and_gets_plain_memory(stage: Stage) -> None:
    gpu = elastic(stage)
    at = gpu.must("alloc(10)")
    (stage.folder / "grants" / stage.key / "burst").unlink()
    wait_for(lambda: not is_elastic(gpu, gpu.must("alloc(2)")))
    gpu.must(f"fill({at}, 10, 7)")
    gpu.must(f"free({at})")


@pytest.mark.parametrize(
    "text",
    [
        "tangram-burst 2\nwait_s 30\nend\n",
        "tangram-burst 1\nwait_s 3601\nend\n",
        f"tangram-burst 1\nwait_s 30\ncard {GPUS[1]} mib=2000 core_percent=0\nend\n",
        f"tangram-burst 1\nwait_s 30\ncard {GPUS[0]} mib=999 core_percent=0\nend\n",
        f"tangram-burst 1\nwait_s 30\ncard {GPUS[0]} mib=2000 core_percent=101\nend\n",
        f"tangram-burst 1\nwait_s 30\n{f'card {GPUS[0]} mib=2000 core_percent=0' + chr(10)}" * 2 + "end\n",
        f"tangram-burst 1\nwait_s 30\ncard {GPUS[0]} mib=2000 core_percent=0\n",
        f"tangram-burst 1\nwait_s 30\ncard {GPUS[0]} mib=2000 core_percent=0\nend\nmore\n",
    ],
)
def test_a_file_that_is_not_understood_gives_no_burst_and_says_so(stage: Stage, text: str) -> None:
    burst(stage, text=text)
    gpu = worker(stage)
    assert not is_elastic(gpu, gpu.must("alloc(10)"))
    assert "burst cannot be read (line" in gpu.end()


def test_bad_and_double_frees_get_the_drivers_own_error(stage: Stage) -> None:
    gpu = elastic(stage)
    at, small = gpu.must("alloc(10)"), gpu.must("alloc(0.1)")
    for bad in (at + 512, small + 512, at + 12 * MIB):
        assert gpu.request(f"free({bad})") == [INVALID_VALUE]
    for once in (at, small):
        assert [gpu.request(f"free({once})") for _ in range(2)] == [[0], [INVALID_VALUE]]
    assert gpu.request("free(0)") == [0]


def test_requests_that_the_driver_refuses_are_refused_alike(stage: Stage) -> None:
    gpu, other = elastic(stage), plain(stage)
    for request in (
        "alloc_bytes(0)",
        "alloc_nowhere()",
        "alloc_bytes(2**60)",
        "alloc_rows(100, 5, 3)",
        "alloc_rows(0, 5)",
        "alloc_rows(100, 0)",
    ):
        assert gpu.request(request)[0] == other.request(request)[0] != 0, request
    gpu.must("no_context()")
    other.must("no_context()")
    assert gpu.request("alloc(1)")[0] == other.request("alloc(1)")[0] != 0


def test_memory_is_freed_without_a_current_context(stage: Stage) -> None:
    gpu = elastic(stage)
    at = gpu.must("alloc(10)")
    gpu.must("no_context()")
    gpu.must(f"free({at})")


def test_rows_have_the_drivers_pitch(stage: Stage) -> None:
    gpu, other = elastic(stage), plain(stage)
    for width in (1, 512, 513, 100_000):
        ours, drivers = (one.request(f"alloc_rows({width}, 7)") for one in (gpu, other))
        assert ours[2] == drivers[2] == -(-width // 512) * 512
        assert gpu.request(f"range_of({ours[1]})")[1:] == [ours[1], 7 * ours[2]]


def test_a_free_waits_for_the_work_of_its_context(stage: Stage) -> None:
    gpu = elastic(stage)
    at = gpu.must("alloc(10)")
    gpu.must("busy(300)")
    gpu.must(f"free({at})")
    assert gpu.must("stream_done()"), "the kernel ended before the free returned"


def test_memory_freed_in_a_streams_order_is_kept_when_the_stream_is_there(stage: Stage) -> None:
    gpu = elastic(stage)
    stream = gpu.must("stream_new()")
    at = gpu.must("alloc(600)")
    gpu.must(f"busy(300, {stream})")
    gpu.must(f"stream_free({at}, {stream})")
    assert gpu.request(f"free({at})") == [INVALID_VALUE], "it is freed"
    assert gpu.free_mib() == 400 - ANCHOR_MIB
    gpu.must(f"stream_sync({stream})")
    assert gpu.free_mib() == 1000 - ANCHOR_MIB


def test_a_destroyed_context_takes_its_memory_with_it(stage: Stage) -> None:
    gpu = elastic(stage)
    kept = gpu.must("alloc(1)")
    context = gpu.must("context_new()")
    gone = [gpu.must(f"alloc({mib})") for mib in (300, 0.5, 0.1)]
    gpu.must(f"context_end({context})")
    assert [gpu.request(f"free({at})")[0] for at in gone] == [INVALID_VALUE] * 3
    assert gpu.free_mib() == 998 - ANCHOR_MIB
    gpu.must(f"free({kept})")


def test_reused_memory_is_zeroed_where_the_grant_requests_it(stage: Stage) -> None:
    stage.write_grant(grant_to_text(Grant("default", "a", "1", "main", (GrantGpu(GPUS[0], 1000),), clear=True)))
    gpu = elastic(stage)
    for mib in (4, 0.5):
        at = gpu.must(f"alloc({mib})")
        gpu.must(f"fill({at}, {mib}, 7)")
        gpu.must(f"free({at})")
        assert gpu.must(f"alloc({mib})") == at
        assert set(bytes.fromhex(gpu.must(f"bytes_at({at}, 4096)"))) == {0}


def test_a_pointer_has_the_attributes_of_a_plain_allocation(stage: Stage) -> None:
    gpu, other = elastic(stage), plain(stage)
    for size in (1000, 3 * MIB + 100):
        at, drivers = gpu.must(f"alloc_bytes({size})"), other.must(f"alloc_bytes({size})")
        for name in SAME:
            ours, natives = (
                one.request(f"attribute({base} + 10, '{name}')") for one, base in ((gpu, at), (other, drivers))
            )
            assert ours[0] == natives[0], name
            assert ours[0] != 0 or ours[1] == natives[1], name
        for one, base in ((gpu, at), (other, drivers)):
            assert one.request(f"range_of({base} + 10)") == [0, base, size]
            names = ("DEVICE_POINTER", "RANGE_START_ADDR", "RANGE_SIZE")
            assert one.must(f"attributes({base} + 10, {', '.join(map(repr, names))})") == [base + 10, base, size]
    assert gpu.must(f"attributes({at}, 'CONTEXT')") == gpu.must(f"attributes({gpu.must('managed(2)')}, 'CONTEXT')")


def test_a_buffer_has_one_number_and_no_other_buffer_has_it(stage: Stage) -> None:
    gpu = elastic(stage)
    seen = set()
    for mib, _ in itertools.product((2, 0.5), range(3)):
        at = gpu.must(f"alloc({mib})")
        first, again = (gpu.must(f"attributes({at + offset}, 'BUFFER_ID')")[0] for offset in (0, 100))
        assert first == again
        assert first not in seen
        seen.add(first)
        gpu.must(f"free({at})")


def test_its_physical_memory_is_nobodys_to_retain(stage: Stage) -> None:
    gpu = elastic(stage)
    assert gpu.request(f"retain({gpu.must('alloc(10)')})")[0] == INVALID_VALUE


@pytest.mark.parametrize(
    ("request_", "reason"),
    [
        ("sync_memops({}, 1)", "the program set CU_POINTER_ATTRIBUTE_SYNC_MEMOPS"),
        ("attribute({}, 'P2P_TOKENS')", "the program requested P2P tokens"),
        ("device_handle({})", "the program requested a handle for an address range"),
    ],
)
def test_a_process_that_passes_memory_to_a_device_gets_plain_memory_from_then_on(
    stage: Stage, request_: str, reason: str
) -> None:
    gpu = elastic(stage)
    at = gpu.must("alloc(10)")
    gpu.request(f"sync_memops({at}, 0)")
    assert is_elastic(gpu, gpu.must("alloc(10)"))
    assert gpu.request(request_.format(at))[0] != 0, "no driver does this with memory of cuMemCreate"
    assert not is_elastic(gpu, gpu.must("alloc(10)"))
    gpu.must(f"free({at})")
    assert f"cannot be swapped: {reason}" in gpu.end()


def test_a_process_that_sees_a_gpu_of_others_gets_plain_memory(stage: Stage) -> None:
    burst(stage)
    gpu = stage.worker()
    assert not is_elastic(gpu, gpu.must("alloc(10)"))
    assert "cannot be swapped: the process sees a GPU that its container's grant does not name" in gpu.end()


def test_contents_stay_apart_and_what_is_counted_comes_back(stage: Stage) -> None:
    gpu, draw = elastic(stage), random.Random(5)
    live: dict[int, tuple[int, int]] = {}
    for number in range(300):
        if live and draw.random() < 0.45:
            at = draw.choice(sorted(live))
            size, value = live.pop(at)
            assert set(bytes.fromhex(gpu.must(f"bytes_at({at}, {size})"))) == {value}
            gpu.must(f"free({at})")
        else:
            size = draw.choice((draw.randrange(1, 5000), draw.randrange(1, MIB), draw.randrange(2 * MIB, 12 * MIB)))
            code, at = gpu.request(f"alloc_bytes({size})")
            if code == 0:
                live[at] = (size, number % 256)
                gpu.must(f"fill({at}, {size} / 2**20, {number % 256})")
    for at in live:
        gpu.must(f"free({at})")
    assert gpu.free_mib() == 1000 - ANCHOR_MIB


def test_blocks_are_swapped_by_another_process_and_no_byte_changes(stage: Stage) -> None:
    burst(stage)
    program, env = stage.build / "tests/swapping", stage.env(LD_PRELOAD="", CUDA_VISIBLE_DEVICES="0")
    done = subprocess.run([program, "10"], env=env, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    numbers = re.fullmatch(r"swaps (\d+) bytes (\d+) wrong 0\n", done.stdout)
    assert numbers, done.stdout
    assert int(numbers[1]) > 50

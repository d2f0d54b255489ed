"""With `clear yes` in the grant no program reads what another one left in the GPU's memory.

TANGRAM_FAKE_DIRTY makes the fake driver return memory that begins with another process's bytes, a5 a5 a5 ...
"""

from __future__ import annotations

import pytest

from tests.integration.shim.conftest import GPUS, Stage, Worker
from vgpu.api.codec import grant_to_text
from vgpu.api.grant import Grant, GrantGpu

DIRT, CLEAN = "a5" * 16, "00" * 16

WAYS = {
    "plain": "alloc(8)",
    "in a stream's order": "stream_alloc(8)",
    "in the per-thread stream's order": "stream_alloc(8, 0, '_ptsz')",
    "of a pool": "pool_alloc(8, pool_of()[1])",
    "by handle and mapping": "map_block(create(8)[1], 8)",
    "by handle on another GPU": "context_new(1) and map_block(create(8, 1)[1], 8, device=1)",
}


def worker(stage: Stage, *, clear: bool) -> Worker:
    gpus = (GrantGpu(GPUS[0], 1000), GrantGpu(GPUS[1], 1000))
    stage.write_grant(grant_to_text(Grant("default", "a", "1", "main", gpus, clear=clear)))
    return stage.worker(TANGRAM_FAKE_DIRTY="1")


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS.keys())
def test_memory_is_zeroed_before_the_program_has_it(stage: Stage, way: str) -> None:
    gpu = worker(stage, clear=True)
    at = gpu.must(way)
    assert gpu.must(f"bytes_at({at}, 16)") == CLEAN


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS.keys())
def test_without_the_line_memory_is_passed_on_as_the_driver_returns_it(stage: Stage, way: str) -> None:
    gpu = worker(stage, clear=False)
    at = gpu.must(way)
    assert gpu.must(f"bytes_at({at}, 16)") == DIRT


def test_what_the_program_wrote_survives_a_second_mapping(stage: Stage) -> None:
    gpu = worker(stage, clear=True)
    handle = gpu.must("create(8)")
    at = gpu.must(f"map_block({handle}, 8)")
    gpu.must(f"fill({at}, 8, 0x77)")
    again = gpu.must(f"map_block({handle}, 8)")
    assert gpu.must(f"bytes_at({again}, 16)") == "77" * 16


def test_a_block_that_is_mapped_for_reading_alone_is_zeroed(stage: Stage) -> None:
    gpu = worker(stage, clear=True)
    at = gpu.must("map_block(create(8)[1], 8, flags=1)")
    assert gpu.must(f"bytes_at({at}, 16)") == CLEAN


def test_a_block_that_was_exported_before_it_was_ever_mapped_is_zeroed(stage: Stage) -> None:
    owner = worker(stage, clear=True)
    guest = stage.worker(TANGRAM_FAKE_DIRTY="1")
    _, pid, fd = owner.request(f"export_block({owner.must('create(8, 0, 1)')})")
    at = guest.must(f"map_block({guest.must(f'import_block({pid}, {fd})')}, 8)")
    assert guest.must(f"bytes_at({at}, 16)") == CLEAN


def test_what_the_program_wrote_in_a_part_of_a_block_survives_that_access_is_given_again(stage: Stage) -> None:
    gpu = worker(stage, clear=True)
    handle = gpu.must("create(8)")
    at = gpu.must(f"map_block({handle}, 2)")
    gpu.must(f"fill({at}, 2, 0x77)")
    gpu.must(f"give_access({at}, 2)")
    assert gpu.must(f"bytes_at({at}, 16)") == "77" * 16


def test_memory_that_another_process_shares_is_not_zeroed(stage: Stage) -> None:
    owner = worker(stage, clear=True)
    guest = stage.worker()
    handle = owner.must("create(8, 0, 1)")
    at = owner.must(f"map_block({handle}, 8)")
    owner.must(f"fill({at}, 8, 0x77)")
    _, pid, fd = owner.request(f"export_block({handle})")
    seen = guest.must(f"map_block({guest.must(f'import_block({pid}, {fd})')}, 8)")
    assert guest.must(f"bytes_at({seen}, 16)") == "77" * 16


def test_an_allocation_in_a_capture_is_zeroed_by_the_graph(stage: Stage) -> None:
    gpu = worker(stage, clear=True)
    stream = gpu.must("stream_new()")
    gpu.must(f"capture({stream}, 0)")
    gpu.must(f"stream_alloc(8, {stream})")
    made = gpu.must(f"captured({stream})")
    assert gpu.request(f"graph_kinds({made})") == [0, 10, 2], "an allocation node, then a memset node"

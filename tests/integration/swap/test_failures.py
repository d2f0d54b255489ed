"""What fails while memory is away or moves: a copy, memory of the GPU, the host pool. Containers keep their guarantee, and what is away waits."""

from __future__ import annotations

import re

import pytest

from tests.integration.swap.conftest import BurstNode, BurstProgram, two, until

FOREIGN_PID = 4_000_000


def least_capacity_mib(node: BurstNode) -> int:
    """As the arbiter saw it."""
    trace = node.folder / "swap/trace.jsonl"
    seen = re.findall(r'"GpuSeen".*"capacity_bytes":(\d+)', trace.read_text() if trace.exists() else "")
    return min(map(int, seen), default=256 << 20) >> 20


def are_right(node: BurstNode, *programs: BurstProgram) -> None:
    for program in programs:
        assert program.do("wrong()") == 0, program.name
    assert node.misuses() == ""


@pytest.mark.parametrize("small", [f"fail cuMemcpyDtoHAsync_v2 nth={nth} error=1" for nth in (1, 2)], indirect=True)
def test_a_copy_out_that_fails_leaves_the_memory_where_it_is_and_is_tried_again(small: BurstNode) -> None:
    first, second = two(small)
    assert "a copy failed: DRIVER_FAILED, CUDA error 1" in small.log()
    are_right(small, first, second)


@pytest.mark.parametrize("small", [f"fail cuMemcpyHtoDAsync_v2 nth={nth} error=1" for nth in (1, 2)], indirect=True)
def test_a_copy_back_that_fails_is_done_again(small: BurstNode) -> None:
    first, second = two(small)
    are_right(small, first, second)
    assert "a block was not restored, and will be again" in small.log()


def test_a_gpu_that_others_filled_lets_what_is_away_wait(small: BurstNode) -> None:
    first, second = two(small)
    second.end()
    small.programs.remove(second)
    small.driver.ctl("process", 0, FOREIGN_PID, 256 - small.driver.used_mib() - 4, "greedy")
    first.send("wrong()")
    until(lambda: re.search(r'swap in"', small.log()))
    until(lambda: least_capacity_mib(small) < 200)
    assert small.away_mib("first") > 0
    small.driver.ctl("gone", FOREIGN_PID)
    assert first.answer() == 0
    assert small.misuses() == ""


@pytest.mark.parametrize("nth", [9, 10])
def test_a_block_that_the_driver_does_not_make_is_made_later(small: BurstNode, nth: int) -> None:
    """Its first eight are made when the program allocates."""
    first = small.run("first", 32, 200, wait_s=600, TANGRAM_FAKE_FAULTS=f"fail cuMemCreate nth={nth}")
    second = small.run("second", 32, 200, wait_s=600)
    for number, program in enumerate((first, second)):
        assert program.do(f"prepare(50, {number + 77})") == 0
    are_right(small, first, second, first)


def test_the_pool_ends_and_comes_back_while_memory_is_away(small: BurstNode) -> None:
    first, second = two(small)
    small.copier.terminate()
    assert small.copier.wait(30) == 0
    until(lambda: "the copier is away" in small.log())
    first.send("wrong()")
    assert second.do("wrong()") == 0, "the others go on"
    second.do("free_all()")
    assert small.away_mib("first") > 0
    small.start_copier()
    assert first.answer() == 0
    assert small.misuses() == ""

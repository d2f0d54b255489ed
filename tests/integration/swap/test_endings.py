"""Programs that end, are replaced, fork, free or allocate while their memory is away or moves: nothing of them is left, and the others go on."""

from __future__ import annotations

import pytest

from tests.integration.swap.conftest import BurstNode, two, until


def nothing_is_left_of(node: BurstNode, name: str) -> None:
    until(lambda: not [record for record in node.records() if record.name == name])
    until(lambda: not node.descriptors())
    assert node.misuses() == ""


def test_a_program_that_exits_while_away_leaves_nothing(small: BurstNode) -> None:
    first, second = two(small)
    first.send("sys.exit()")
    first.process.wait()
    nothing_is_left_of(small, "first")
    assert second.do("wrong()") == 0


def test_a_program_that_exits_while_its_memory_moves_leaves_nothing(small: BurstNode) -> None:
    first, second = two(small)
    first.send("add()")
    first.send("sys.exit()")
    second.send("mix(0.5)")
    first.process.wait()
    nothing_is_left_of(small, "first")
    assert second.answer() >= 1
    assert second.do("wrong()") == 0


@pytest.mark.parametrize("words", ["['-c', 'input()']", "[sys.argv[0]]"])
def test_a_program_that_is_replaced_while_away_leaves_nothing(small: BurstNode, words: str) -> None:
    """By one without CUDA, and by one that uses the GPU, too. It keeps its process ID and start time."""
    first, second = two(small)
    first.send(f"__import__('os').execv(sys.executable, [sys.executable, *{words}])")
    nothing_is_left_of(small, "first")
    assert second.do("mix(0)") >= 1
    assert second.do("wrong()") == 0


def test_a_child_without_cuda_keeps_nothing_of_its_parent(small: BurstNode) -> None:
    first, second = two(small)
    first.send("__import__('os').fork() == 0 and __import__('time').sleep(1000)")
    assert first.answer() is False
    first.end()
    small.programs.remove(first)
    nothing_is_left_of(small, "first")
    assert second.do("wrong()") == 0


def test_memory_that_is_freed_while_away_does_not_come_back_wrong(small: BurstNode) -> None:
    first, second = two(small)
    first.do("[check(cuda.cuMemFree_v2(U64(at))) or blocks.pop(at) for at in list(blocks)[:3]]")
    assert second.do("wrong()") == 0
    assert first.do("fill(50, 5)") == 0
    assert first.do("wrong()") == 0
    assert second.do("wrong()") == 0
    assert small.misuses() == ""


def test_a_program_may_allocate_while_its_memory_is_away(small: BurstNode) -> None:
    first, second = two(small)
    assert first.do("alloc(8)[0]") == 0
    assert first.do("fill(8, 9)") == 0
    first.do("blocks.pop(list(blocks)[-2])")  # it was never written
    for program in (first, second, first):
        assert program.do("wrong()") == 0
    assert small.misuses() == ""


def test_a_context_that_is_destroyed_while_away_takes_its_memory_along(small: BurstNode) -> None:
    first, second = two(small)
    first.send("check(cuda.cuCtxDestroy_v2(context)) or blocks.clear()")
    first.answer()
    assert second.do("wrong()") == 0
    first.do("check(cuda.cuCtxCreate_v2(ctypes.byref(context), 0, 0))")
    assert first.do("alloc(100)[0]") == 0
    nothing_is_left_of(small, "first")

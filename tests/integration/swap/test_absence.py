"""What containers may use while the pool, the arbiter or their limits are not there: by arbiter, copier and library, as on a node."""

from __future__ import annotations

import re

import pytest

from tests.integration.swap.conftest import BurstNode, until

OUT_OF_MEMORY = 2
WAIT_S = 1
ENOUGH_READINGS = 4
"""A container is over its limit after two in a row; the first may be of before."""


def kill_arbiter(node: BurstNode) -> None:
    node.arbiter.kill()
    node.arbiter.wait()
    (node.folder / "status.sock").unlink()


def kill_copier(node: BurstNode) -> None:
    node.copier.kill()
    node.copier.wait()


def no_pool(node: BurstNode, name: str = "first") -> str:
    status = node.status(name)
    assert status is not None
    assert status.swap is not None
    return status.swap.no_pool


def waiting(node: BurstNode, name: str) -> int:
    status = node.status(name)
    return status.swap.waiting if status is not None and status.swap is not None else 0


def test_without_a_pool_a_container_has_its_guarantee_until_the_pool_is_there(node: BurstNode) -> None:
    kill_copier(node)
    kill_arbiter(node)
    node.start_arbiter()
    program = node.run("first")
    until(lambda: program.do("memory()")[1] == 100)
    assert "Connection refused" in no_pool(node) or "No such file" in no_pool(node)
    code, seconds = program.do("alloc(600)")
    assert code == OUT_OF_MEMORY
    assert seconds < 10, "it does not wait, for which it may take 30 s"
    assert program.do("fill(20, 1)") == 0
    node.start_copier()
    until(lambda: program.do("memory()")[1] == 900)
    assert no_pool(node) == ""
    assert program.do("fill(600, 2)") == 0


def test_a_pool_that_ends_leaves_what_is_there_and_nothing_more_is_granted(node: BurstNode) -> None:
    patient, hasty = node.run("patient", wait_s=600), node.run("hasty", wait_s=0)
    assert patient.do("fill(300, 1)") == 0
    assert hasty.do("fill(300, 2)") == 0
    kill_copier(node)
    until(lambda: no_pool(node, "hasty"))
    assert hasty.do("memory()")[1] == 900
    assert hasty.do("alloc(10)")[0] == OUT_OF_MEMORY
    patient.send("fill(10, 3)")
    until(lambda: waiting(node, "patient") == 1)
    for program in (hasty, node.run("later")):
        assert program.do("fill(20, 4)") == (OUT_OF_MEMORY if program is hasty else 0)
        assert program.do("wrong()") == 0
    assert node.programs[-1].do("memory()")[1] == 100, "it started without a pool"
    node.start_copier()
    assert patient.answer() == 0
    assert patient.do("wrong()") == 0
    until(lambda: node.programs[-1].do("memory()")[1] == 900)
    assert node.misuses() == ""


def test_after_a_restart_containers_above_their_guarantee_get_memory_within_it(node: BurstNode) -> None:
    first, second = node.run("first"), node.run("second")
    assert first.do("fill(600, 1)") == 0
    assert second.do("fill(600, 2)") == 0, "the first is away"
    kill_arbiter(node)
    node.start_arbiter()
    for _ in range(2):
        for program in (second, first):
            assert program.do("managed(10)") == 0
            assert program.do("wrong()") == 0
            assert program.do("work(0.1)") > 0
            assert program.do("wrong()") == 0
    assert node.misuses() == ""


@pytest.mark.parametrize("left_mib", [None, 300])
def test_a_container_whose_limit_falls_below_what_it_has_gives_way_and_is_not_killed(
    node: BurstNode, left_mib: int | None
) -> None:
    """Its limit is removed, or becomes lower. The policy for containers over their limit kills."""
    first, second = node.run("first"), node.run("second", guarantee_mib=600, limit_mib=600)
    assert first.do("fill(600, 1)") == 0
    if left_mib is None:
        (node.grants / "first" / "burst").unlink()
    else:
        node.limit("first", left_mib)
    until(lambda: first.do("memory()") == [0, left_mib or 100])
    assert first.do("alloc(10)")[0] == OUT_OF_MEMORY
    readings = node.readings()
    until(lambda: node.readings() >= readings + ENOUGH_READINGS)
    assert first.do("wrong()") == 0, "what it has it keeps"
    swaps = node.swaps_out()
    assert second.do("fill(500, 2)") == 0, "its guarantee: the first has more than its own"
    assert node.swaps_out() > swaps
    assert second.do("wrong()") == 0
    second.do("free_all()")
    assert first.do("wrong()") == 0
    assert first.do("alloc(10)")[0] == OUT_OF_MEMORY
    first.do("free_all()")
    assert first.do("fill(60, 3)") == 0, "it is below its limit again"
    assert node.document().kills == ()
    assert node.misuses() == ""


def test_an_allocation_that_requests_several_times_waits_once_in_all(node: BurstNode) -> None:
    """First, and again after the library has released what it kept of freed memory."""
    program = node.run("first", wait_s=WAIT_S)
    until(lambda: program.do("memory()")[1] == 900)
    kill_copier(node)
    until(lambda: no_pool(node))
    for _ in range(2):  # a second allocation may wait again
        assert program.do("fill(50, 1)") == 0
        program.do("free_all()")
        before = len(waits_s(node))
        assert program.do("alloc(600)")[0] == OUT_OF_MEMORY
        requests = waits_s(node)[before:]
        assert len(requests) >= 2, "else this shows nothing"
        assert requests[0] > 0
        assert sum(requests) < WAIT_S + 0.1


def waits_s(node: BurstNode) -> list[float]:
    """How long each request that the policy got until now may wait, by the arbiter's trace."""
    trace, readings = node.folder / "swap/trace.jsonl", node.readings()
    until(lambda: node.readings() > readings + 1)  # what happened before is written
    lines = trace.read_text().splitlines() if trace.exists() else []
    return [float(found[1]) for line in lines if (found := re.search(r'"Requested".*"wait_s":\s*([0-9.]+)', line))]

"""An idle program frees memory while it is away: with the real arbiter, copier and library, and an arbiter that is killed meanwhile."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.swap.conftest import BurstNode, BurstProgram, until


def idle_and_busy(node: BurstNode) -> tuple[BurstProgram, BurstProgram]:
    """Two that do not fit together; the first is away."""
    first, second = node.run("first", 32, 200, wait_s=600), node.run("second", 32, 200, wait_s=600)
    assert [first.do(f"fill({mib}, {mib})") for mib in (60, 50, 40)] == [0, 0, 0]
    assert [second.do(f"fill({mib}, {mib})") for mib in (60, 50, 40)] == [0, 0, 0]
    until(lambda: node.away_mib("first") > 0)
    return first, second


def leased_mib(node: BurstNode, name: str) -> int:
    status = node.status(name)
    return sum(card.leased_bytes for card in status.gpus) >> 20 if status is not None else 0


def free(program: BurstProgram, count: int = 3) -> None:
    """Its first allocations."""
    program.do(f"[check(cuda.cuMemFree_v2(U64(at))) or blocks.pop(at) for at in list(blocks)[:{count}]] and None")


def test_it_returns_its_slots_and_its_lease_without_any_work(small: BurstNode) -> None:
    first, second = idle_and_busy(small)
    free(first)
    until(lambda: not [one for one in small.records() if one.name == "first"])
    until(lambda: leased_mib(small, "first") < 32)
    assert second.do("wrong()") == 0
    assert first.do("fill(30, 5)") == 0
    assert first.do("wrong()") == 0
    assert small.misuses() == ""


@pytest.mark.parametrize("when", ["before it is read", "while the records cannot be written", "after the answer"])
def test_an_arbiter_that_is_killed_loses_nothing_of_it(small: BurstNode, when: str) -> None:
    first, second = idle_and_busy(small)
    stopped = when == "before it is read"
    if stopped:
        small.kill(small.arbiter)
    folder = small.folder / "swap"
    if when == "while the records cannot be written":
        folder.rename(folder.with_name("swap.away"))
    free(first, 2)
    if when == "while the records cannot be written":
        until(lambda: "cannot be written" in small.log())
        folder.with_name("swap.away").rename(folder)
    if when == "after the answer":
        until(lambda: leased_mib(small, "first") < 60)
    if not stopped:
        small.kill(small.arbiter)
    Path(small.folder / "status.sock").unlink(missing_ok=True)
    small.start_arbiter()
    until(lambda: leased_mib(small, "first") < 60)
    until(lambda: small.away_mib("first") <= 40)
    assert first.do("wrong()") == 0
    assert second.do("wrong()") == 0
    for program in (first, second):
        program.do("free_all()")
    until(lambda: not small.records())
    assert small.misuses() == ""

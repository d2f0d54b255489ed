"""Containers that use more than the GPU has together: by arbiter, copier and library, as on a node."""

from __future__ import annotations

from tests.integration.swap.conftest import BurstNode


def test_an_idle_container_gives_way_and_comes_back_whole(node: BurstNode) -> None:
    first, second = node.run("first"), node.run("second")
    assert first.do("fill(600, 1)") == 0
    free, total = first.do("memory()")
    assert total == 900
    assert 0 < free <= 300
    assert second.do("fill(600, 2)") == 0, "the first is idle: it gives way"
    assert second.do("wrong()") == 0
    assert first.do("wrong()") == 0, "it comes back as soon as it works"
    assert second.do("wrong()") == 0
    assert node.swaps_out() >= 2
    assert node.misuses() == ""

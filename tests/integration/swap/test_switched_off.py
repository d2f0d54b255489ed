"""Bursts are switched off on a node whose containers are above their guarantees."""

from __future__ import annotations

import threading

from tests.integration.swap.conftest import BurstNode, until


def test_a_container_above_its_guarantee_is_not_killed_for_it(node: BurstNode) -> None:
    """Although its pod has the policy `kill`."""
    program = node.run("first", guarantee_mib=100, limit_mib=900)
    assert program.do("fill(700, 1)") == 0
    node.kill(node.arbiter)
    (node.folder / "status.sock").unlink()
    (node.grants / "first/burst").unlink()
    node._until_ready = lambda: None  # type: ignore[method-assign]
    node.start_arbiter(TANGRAM_ARBITER_BURST="false", TANGRAM_ARBITER_GUARD_SLACK_MIB="16")
    until(lambda: node.log().count('"event": "serving"') == 2)
    until(lambda: node.metrics().get("tangram_arbiter_nvml_up") == 1)
    threading.Event().wait(5)  # several readings: two in a row would kill it
    assert program.do("wrong()") == 0
    assert node.metrics()["tangram_arbiter_kills_total"] == 0
    assert program.do("alloc(50)")[0] == 2, "it gets nothing more"

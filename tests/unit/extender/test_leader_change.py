"""What docs/development/leader-change.md describes of two extenders that are active at once: each places pods as if the other were not there."""

from __future__ import annotations

from pathlib import Path

from tests.builders import gpu, pod, share
from tests.unit.extender.extender_parts import FULL_MIB, HALF_MIB, ExtenderParts

PAGE = Path(__file__).parents[3] / "docs/development/leader-change.md"


def test_both_may_assign_the_same_capacity_see_it_and_place_nothing_more_there() -> None:
    old, new = ExtenderParts(n1=1), ExtenderParts(n1=1)
    first, second = pod("first").asking(mib=FULL_MIB), pod("second").asking(mib=FULL_MIB)
    for parts in (old, new):
        parts.report(first)
        parts.report(second)
    assert old.filter(first, "n1").node_names == ["n1"]
    assert new.filter(second, "n1").node_names == ["n1"], "it does not see the other's reservation"
    for parts in (old, new):
        for built in (first, second):
            parts.report(built.on("n1").assigned(share(gpu(0), FULL_MIB)))
        assert parts.state.fleet.overcommitted() != []
        assert parts.filter(pod("third").asking(mib=1024), "n1").node_names == []
    text = PAGE.read_text()
    assert "# Two extenders at a leader change" in text
    assert "tangram_extender_overcommitted_gpus" in text


def test_the_capacity_of_the_pod_that_the_kubelet_refuses_is_released() -> None:
    parts = ExtenderParts(n1=1)
    for name in ("first", "second"):
        parts.report(pod(name).asking(mib=HALF_MIB + 1024).on("n1").assigned(share(gpu(0), HALF_MIB + 1024)))
    assert parts.state.fleet.overcommitted() != []
    parts.report(pod("second").asking(mib=HALF_MIB + 1024).on("n1").with_phase("Failed"))
    assert parts.state.fleet.overcommitted() == []
    assert parts.filter(pod("third").asking(mib=1024), "n1").node_names == ["n1"]

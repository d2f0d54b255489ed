"""What docs/development/leader-change.md says of two extenders that are active at once: each places pods as if the other were not there."""

from __future__ import annotations

from pathlib import Path

from tests.builders import gpu, pod, share
from tests.unit.extender.world import FULL_MIB, HALF_MIB, World

PAGE = Path(__file__).parents[3] / "docs/development/leader-change.md"


def test_both_may_give_the_same_room_away_see_it_and_place_nothing_more_there() -> None:
    old, new = World(n1=1), World(n1=1)
    first, second = pod("first").asking(mib=FULL_MIB), pod("second").asking(mib=FULL_MIB)
    for world in (old, new):
        world.report(first)
        world.report(second)
    assert old.filter(first, "n1").node_names == ["n1"]
    assert new.filter(second, "n1").node_names == ["n1"], "it does not know of the other's reservation"
    for world in (old, new):
        for built in (first, second):
            world.report(built.on("n1").assigned(share(gpu(0), FULL_MIB)))
        assert world.state.fleet.overcommitted() != []
        assert world.filter(pod("third").asking(mib=1024), "n1").node_names == []
    text = PAGE.read_text()
    assert "# Two extenders at a leader change" in text
    assert "tangram_extender_overcommitted_gpus" in text


def test_the_one_that_the_kubelet_refuses_gives_its_room_back() -> None:
    world = World(n1=1)
    for name in ("first", "second"):
        world.report(pod(name).asking(mib=HALF_MIB + 1024).on("n1").assigned(share(gpu(0), HALF_MIB + 1024)))
    assert world.state.fleet.overcommitted() != []
    world.report(pod("second").asking(mib=HALF_MIB + 1024).on("n1").with_phase("Failed"))
    assert world.state.fleet.overcommitted() == []
    assert world.filter(pod("third").asking(mib=1024), "n1").node_names == ["n1"]

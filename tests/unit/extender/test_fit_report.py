"""The Event that says that a request fits a node's GPUs together and no single one."""

from __future__ import annotations

import pytest

from extender.fit_report import AGAIN_S, AT_ONCE, NOTED, REASON, SETTLE_S
from tests.builders import PodBuilder, gpu, pod, share
from tests.unit.extender.world import FULL_MIB, HALF_MIB, World

Reported = list[tuple[str, str, str]]


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    """Two GPUs, each half taken by a pod that nobody may evict."""
    made = World(n1=2)
    for row in (0, 1):
        made.report(pod(f"v{row}").asking(mib=HALF_MIB, core=10).on("n1").assigned(share(gpu(row), HALF_MIB, 10)))
    made.reported = []  # type: ignore[attr-defined]
    monkeypatch.setattr(
        made.preemption._recorder,
        "event",
        lambda about, reason, note, *_, **__: made.reported.append((about.name, reason, note)),  # type: ignore[attr-defined]
    )
    return made


def reported(world: World) -> Reported:
    return world.reported  # type: ignore[attr-defined,no-any-return]


def turned_away(world: World, built: PodBuilder) -> None:
    world.report(built)
    assert world.filter(built, "n1").node_names == []


def later(world: World, seconds: float = SETTLE_S) -> None:
    world.now_s += seconds
    world.preemption.expire()


def test_a_pod_that_the_sum_would_take_is_shown_what_there_is(world: World) -> None:
    turned_away(world, pod("a").asking(mib=HALF_MIB + 1024, core=20))
    later(world)
    assert reported(world) == [
        (
            "a",
            REASON,
            "Fits the sum of node n1, no single GPU: 2 GPUs have 81920 MiB and 180 % gpu-core free together, "
            "the best of them 40960 MiB and 90 %; the pod requests 41984 MiB and 20 % gpu-core of one GPU",
        )
    ]


def test_a_pod_that_no_sum_would_take_is_not(world: World) -> None:
    for row in (0, 1):
        world.report(pod(f"w{row}").asking(mib=HALF_MIB).on("n1").assigned(share(gpu(row), HALF_MIB)))
    turned_away(world, pod("a").asking(mib=HALF_MIB))
    later(world)
    assert reported(world) == []


def test_it_is_reported_once_in_a_while_and_not_at_every_try(world: World) -> None:
    for _ in range(3):
        turned_away(world, pod("a").asking(mib=FULL_MIB))
        later(world)
    assert len(reported(world)) == 1
    later(world, AGAIN_S)
    turned_away(world, pod("a").asking(mib=FULL_MIB))
    later(world)
    assert len(reported(world)) == 2


@pytest.mark.parametrize("change", ["bound", "gone", "placed"])
def test_a_pod_that_needs_no_reporting_any_more_gets_none(world: World, change: str) -> None:
    asking = pod("a").asking(mib=FULL_MIB)
    turned_away(world, asking)
    if change == "bound":
        world.report(pod("a").asking(mib=FULL_MIB).on("n2").assigned(share(gpu(0, node="n2"), FULL_MIB)))
    elif change == "gone":
        world.end("a")
    else:
        world.end("v0")
        assert world.filter(asking, "n1").node_names == ["n1"]
    later(world)
    assert reported(world) == []


def test_a_pod_that_room_is_made_for_is_not_reported(world: World) -> None:
    urgent = pod("a").asking(mib=FULL_MIB).of_priority(1000)
    turned_away(world, urgent)
    assert list(world.preempt(urgent, n1=["v0"]).nodes) == ["n1"]
    later(world)
    assert reported(world) == []


def test_of_many_few_are_noted_and_reported_at_a_time(world: World) -> None:
    for at in range(NOTED + 5):
        turned_away(world, pod(f"p{at}").asking(mib=FULL_MIB))
    later(world)
    assert len(reported(world)) == AT_ONCE
    for _ in range(NOTED):
        later(world, 1.0)
    assert len({name for name, _, _ in reported(world)}) == NOTED

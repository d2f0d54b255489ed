"""A cordon counts as soon as the watch shows the operator's annotation, before the node's plugin has published it."""

from __future__ import annotations

import msgspec
import pytest

from extender.compact import small_node
from extender.reasons import NO_EVICTION_HELPS, UNREADABLE_CORDONS
from extender.state import State
from extender.watch_intake import WatchIntake
from kube.objects import Node
from tests.builders import cordoned, gpu, node
from vgpu.api.cordon import Cordon, cordons_to_json
from vgpu.api.inventory import WITHDRAWN as WITHDRAWN_STATE
from vgpu.api.inventory import GpuCondition, withdraw
from vgpu.api.names import DEFAULT
from vgpu.api.request import GpuRequest, PodRequest
from vgpu.scheduling.placement import TOO_FEW, WITHDRAWN, Placement, explain, place

FULL_MIB = 81_920


def request(mib: int = 1024, gpus: int = 1) -> PodRequest:
    return PodRequest((GpuRequest("main", "share", gpus, units=mib, mib=mib, core_percent=0),))


def shown(*ordered: int, text: str | None = None, published: str = "") -> Node:
    """Node n1 with two GPUs. `published`: the state of those in the inventory of its plugin."""
    gpus = [cordoned(gpu(at), published if at in ordered else "") for at in range(2)]
    thing = node("n1").with_inventory(*gpus).plain()
    text = cordons_to_json({gpu(at).uuid: Cordon() for at in ordered}) if text is None else text
    if text is not None and not published:
        thing["metadata"]["annotations"][DEFAULT.cordoned_gpus] = text
    return msgspec.convert(thing, Node)


class Watched:
    def __init__(self) -> None:
        self.state, self.before = State(lambda: 0.0, names=DEFAULT), None
        self.show(shown())

    def show(self, now: Node) -> None:
        WatchIntake(self.state).node_changed(self.before, now)
        self.before: Node | None = now

    def why(self, of: PodRequest) -> str:
        return explain(self.state.fleet, of, ["n1"]).get("n1", "")


def test_no_pod_is_placed_on_a_cordoned_gpu_and_the_reason_says_so() -> None:
    made = Watched()
    made.show(shown(0))
    for _ in range(3):
        found = place(made.state.fleet, request(), ["n1"])
        assert isinstance(found, Placement)
        assert {one.uuid for one in found.assignment.held()} == {gpu(1).uuid}
    assert made.why(request(gpus=2)) == WITHDRAWN
    assert WITHDRAWN in NO_EVICTION_HELPS
    made.show(shown(0, 1))
    assert made.why(request()) == WITHDRAWN
    made.show(shown())
    assert made.why(request(gpus=2)) == ""


@pytest.mark.parametrize("state", ["cordoned", "not-released", "released", "testing"])
def test_what_the_plugin_withdraws_stays_so_without_the_annotation(state: str) -> None:
    made = Watched()
    made.show(shown(0, published=state))
    assert made.why(request(gpus=2)) == WITHDRAWN


@pytest.mark.parametrize(
    ("reason", "why"), [("GpuClash", WITHDRAWN), ("OwnerUnknown", WITHDRAWN), ("NotSelected", TOO_FEW)]
)
def test_a_gpu_of_another_plugin_gets_no_pod_and_one_that_is_not_selected_is_none_of_ours(
    reason: str, why: str
) -> None:
    made = Watched()
    gpus = withdraw(gpu(0), GpuCondition(reason, WITHDRAWN_STATE, 1)), gpu(1)
    made.show(msgspec.convert(node("n1").with_inventory(*gpus).plain(), Node))
    found = place(made.state.fleet, request(), ["n1"])
    assert isinstance(found, Placement)
    assert {one.uuid for one in found.assignment.held()} == {gpu(1).uuid}
    assert made.why(request(gpus=2)) == why


def test_a_node_whose_list_cannot_be_read_takes_no_pods_until_it_can() -> None:
    made = Watched()
    made.show(shown(text="all"))
    assert made.state.inventories.reason("n1") == UNREADABLE_CORDONS
    assert "n1" not in made.state.fleet.column
    made.show(shown())
    assert made.why(request(gpus=2)) == ""


def test_what_is_kept_of_a_node_has_its_cordons() -> None:
    kept = small_node(DEFAULT)(shown(0))
    assert kept.metadata.annotation(DEFAULT.cordoned_gpus) == cordons_to_json({gpu(0).uuid: Cordon()})
    assert small_node(DEFAULT)(shown()).metadata.annotation(DEFAULT.cordoned_gpus) is None

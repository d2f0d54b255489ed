"""A snapshot has all that placement depends on: what is read back decides as the extender did."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest

from extender.reasons import UNREADABLE_ASSIGNMENT
from extender.snapshot import snapshot_of
from extender.state import State
from extender.watch_intake import WatchIntake
from kube.objects import Node, Pod
from tests.builders import mig_gpu, node, pod
from vgpu.api.errors import BadDocument, NewerVersion
from vgpu.api.names import DEFAULT
from vgpu.api.request import PodRequest
from vgpu.scheduling.placement import NoFit, Placement, place
from vgpu.scheduling.snapshot import Snapshot, drift, fleet_of, snapshot_from_json, snapshot_to_json


def asking(state: State, mib: int = 0, mig: str = "") -> PodRequest:
    return state.request_of(pod("x").asking(mib=mib, mig=mig).build())


@pytest.fixture
def state() -> State:
    """A cluster with some of everything: shares, MIG, a reserved pod, one that is starting, a node taken out."""
    made = State(lambda: 0.0, names=DEFAULT)
    nodes = [
        node("n1").with_gpus(2).with_access("cdi"),
        node("n2").with_inventory(mig_gpu(0, "1g.10gb", "1g.10gb", node="n2")),
        node("n3").with_gpus(1),
        node("n4"),
    ]
    for built in nodes:
        WatchIntake(made).node_changed(None, built.build())
    for name, node_name, request in (
        ("share", "n1", asking(made, 8192)),
        ("more", "n1", asking(made, 40_960)),
        ("mig", "n2", asking(made, mig="1g.10gb")),
    ):
        placement = made.place(request, [node_name])
        assert not isinstance(placement, NoFit)
        made.reserve(f"uid-{name}", f"default/{name}", request, placement)
    made.on("bind", "uid-more")
    made.on("accepted", "uid-more")
    WatchIntake(made).pod_changed(None, pod("broken").asking(mib=1024).on("n3").assigned(text="{").build())
    return made


def test_what_is_read_back_is_what_was_written(state: State) -> None:
    snapshot = snapshot_of(state).whole()
    assert snapshot_from_json(snapshot_to_json(snapshot)) == snapshot
    assert [(one.key, one.stage) for one in snapshot.pods] == [
        ("default/share", "reserved"), ("default/more", "bound"), ("default/mig", "reserved"),
    ]  # fmt: skip
    assert [one.name for one in snapshot.nodes if one.excluded == UNREADABLE_ASSIGNMENT] == ["n3"]
    assert [one.name for one in snapshot.nodes if one.inventory is None] == ["n4"]
    assert snapshot.pods[0].starting[0].resource == "tangram.sh/gpu-mem"


def test_the_fleet_made_of_it_decides_as_the_extender_does(state: State) -> None:
    replayed = fleet_of(snapshot_from_json(snapshot_to_json(snapshot_of(state).whole())))
    names = ["n1", "n2", "n3", "n4"]
    for request in (asking(state, 1024), asking(state, 81_920), asking(state, mig="1g.10gb")):
        assert place(replayed, request, names) == place(state.fleet, request, names)
    assert list(drift(snapshot_of(state).whole())) == []


def test_what_was_learnt_and_what_processors_have_left_decide_as_they_did() -> None:
    """Pods request much CPU beside a GPU: on the node that has it left, an idle GPU counts."""
    state = State(lambda: 0.0, names=DEFAULT)
    for name, cpu in (("a", "64"), ("b", "4"), ("c", "")):
        plain = node(name).with_gpus(2).plain() | ({"status": {"allocatable": {"cpu": cpu}}} if cpu else {})
        WatchIntake(state).node_changed(None, msgspec.json.decode(msgspec.json.encode(plain), type=Node))
    for at in range(40):
        plain = pod(f"p{at}").asking(gpus=1).plain()
        plain["spec"]["containers"][0]["resources"]["requests"]["cpu"] = "16"
        WatchIntake(state).pod_changed(None, msgspec.json.decode(msgspec.json.encode(plain), type=Pod))
    request = state.request_of(pod("x").asking(mib=8192).annotated(placement="fragmentation").build())
    before = state.fleet.distribution._known()
    read = snapshot_from_json(snapshot_to_json(snapshot_of(state).whole()))
    assert [(one.name, one.cpu_free_milli) for one in read.nodes] == [("a", 64_000), ("b", 4_000), ("c", None)]
    ((requested, times),) = read.distribution
    assert (requested.gpus, requested.mib, requested.cpu_milli, times) == (1, -1, 16_000, 40)
    replayed = fleet_of(read)
    assert place(replayed, request, ["a", "b"]) == place(state.fleet, request, ["a", "b"])
    assert isinstance(found := place(replayed, request, ["a", "b"]), Placement)
    assert found.node == "b"
    without = fleet_of(
        replace(read, distribution=(), nodes=tuple(replace(one, cpu_free_milli=None) for one in read.nodes))
    )
    assert isinstance(found := place(without, request, ["a", "b"]), Placement)
    assert found.node == "a", "else this test shows nothing"
    assert before is not state.fleet.distribution._known(), "and from here on it decides by what was written down"


def test_a_document_of_version_1_reads_as_if_nothing_was_reported(state: State) -> None:
    document = msgspec.json.decode(snapshot_to_json(snapshot_of(state).whole()))
    del document["mix"]
    for one in document["nodes"]:
        one.pop("cpu_free_milli", None)
    old = snapshot_from_json(msgspec.json.encode(document | {"v": 1}))
    assert old.distribution == ()
    assert old.pods == snapshot_of(state).whole().pods
    assert list(drift(old)) == []


def test_a_count_that_went_wrong_shows(state: State) -> None:
    state.fleet.free_mib[1, state.fleet.column["n1"]] -= 7
    ((name, reported, right),) = drift(snapshot_of(state).whole())
    assert (name, right.mib - reported.mib) == ("n1", 7)


def wrong(snapshot: Snapshot, **changes: object) -> bytes:
    """The document with a top-level field changed."""
    document = msgspec.json.decode(snapshot_to_json(snapshot))
    return msgspec.json.encode(document | changes)


def test_what_cannot_be_understood_in_full_is_refused_with_what_and_why(state: State) -> None:
    snapshot = snapshot_of(state).whole()
    with pytest.raises(NewerVersion, match="snapshot is of version 6: this Tangram reads versions 1 to 5"):
        snapshot_from_json(wrong(snapshot, v=6))
    with pytest.raises(BadDocument, match="mix: times is 0: it must be 1 to 2147483647"):
        snapshot_from_json(wrong(snapshot, mix=[{"times": 0}]))
    with pytest.raises(BadDocument, match="version 0"):
        snapshot_from_json(wrong(snapshot, v=0))
    for body in (b"", b"[]", b"\xff", b'{"v":1}'):
        with pytest.raises(BadDocument, match="snapshot cannot be read"):
            snapshot_from_json(body)
    first = snapshot.pods[0]
    with pytest.raises(BadDocument, match="pod default/share: stage is 'lost': it must be one of reserved"):
        snapshot_from_json(snapshot_to_json(replace(snapshot, pods=(replace(first, stage="lost"),))))
    pods = [{"uid": "u", "key": "a/b", "node": "n", "stage": "bound", "assignment": {"v": 9}}]
    with pytest.raises(BadDocument, match="pod a/b: assignment is of version 9"):
        snapshot_from_json(wrong(snapshot, pods=pods))
    with pytest.raises(BadDocument, match="node n1: inventory cannot be read"):
        snapshot_from_json(wrong(snapshot, nodes=[{"name": "n1", "inventory": {"v": 1}}]))
    nodes = tuple(replace(one, free=snapshot.nodes[0].free[:1]) for one in snapshot.nodes if one.name == "n3")
    with pytest.raises(BadDocument, match="node n3: free names 1 GPUs: they must be the 0"):
        snapshot_from_json(snapshot_to_json(replace(snapshot, nodes=nodes)))


@pytest.mark.parametrize(
    ("what", "value"),
    [
        ("times", 2**31), ("cards", -1), ("cards", 17), ("mib", -2), ("mib", 2**24), ("mib", 2**70), ("percent", 101),
        ("percent", -1), ("cpu_milli", -1), ("cpu_milli", 2**31),
    ],
)  # fmt: skip
def test_a_request_that_no_pod_can_have_is_refused(state: State, what: str, value: int) -> None:
    with pytest.raises(
        BadDocument, match=f"snapshot: mix: {what} is {value}: it must be -?[01] to [0-9]+|cannot be read"
    ):
        snapshot_from_json(wrong(snapshot_of(state).whole(), mix=[{"times": 1, what: value}]))


def test_a_request_that_stands_twice_is_refused_for_one_would_be_forgotten(state: State) -> None:
    distribution = [{"times": 3, "cards": 1}, {"times": 4, "cards": 2}, {"times": 5, "cards": 1}]
    with pytest.raises(BadDocument, match="mix: only 2 of 3 requests differ: each must stand in it once"):
        snapshot_from_json(wrong(snapshot_of(state).whole(), mix=distribution))


@pytest.mark.parametrize("value", [2**31, -(2**31), 2**70])
def test_processors_that_no_node_can_have_are_refused(state: State, value: int) -> None:
    nodes = [{"name": "n1", "cpu_free_milli": value}]
    with pytest.raises(
        BadDocument, match=f"node n1: cpu_free_milli is {value}: it must be -2147483647 to 2147483647|read"
    ):
        snapshot_from_json(wrong(snapshot_of(state).whole(), nodes=nodes))


@pytest.mark.parametrize("unit", [0, -1024, 100])
def test_a_unit_that_there_is_not_is_refused(state: State, unit: int) -> None:
    with pytest.raises(BadDocument, match=f"unit_mib is {unit}: it must be one of"):
        snapshot_from_json(wrong(snapshot_of(state).whole(), unit_mib=unit))


def test_pods_that_want_more_processors_than_there_are_anywhere_are_written_down_and_read_back() -> None:
    state = State(lambda: 0.0, names=DEFAULT)
    WatchIntake(state).node_changed(None, node("n").with_gpus(1).build())
    state.resources.set_node("n", {"cpu": 1000})
    for name in ("a", "b"):
        plain = pod(name).asking(mib=1024).on("n").plain()
        plain["spec"]["containers"][0]["resources"]["requests"]["cpu"] = "9E"
        WatchIntake(state).pod_changed(None, msgspec.json.decode(msgspec.json.encode(plain), type=Pod))
    request = state.request_of(pod("x").asking(mib=8192).annotated(placement="fragmentation").build())
    assert isinstance(state.place(request, ["n"]), Placement)
    read = snapshot_from_json(snapshot_to_json(snapshot_of(state).whole()))
    assert [one.cpu_free_milli for one in read.nodes] == [-(2**31 - 1)]
    assert isinstance(place(fleet_of(read), request, ["n"]), Placement)

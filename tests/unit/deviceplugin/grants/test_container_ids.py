"""The runtime's ID of a container is written beside its grant as soon as the pod's status has it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from arbiter.grant_file import read_container_id
from deviceplugin.grants.allocation_record import Record
from deviceplugin.grants.container_ids import ContainerIds, ids_of
from deviceplugin.grants.grant_directories import GrantDirectories
from deviceplugin.pods.node_pods import NodePods
from kube.objects import Pod
from tests.builders import PodBuilder, pod
from tests.unit.deviceplugin.builders import uuid
from vgpu.api.codec import assignment_to_json
from vgpu.api.contract import CONTAINER_ID, grant_for
from vgpu.api.grant import AssignedGpu, Assignment
from vgpu.api.names import DEFAULT

X, Y = "c0" * 32, "d1" * 32
SIZED = Assignment(
    {name: (AssignedGpu(uuid(0), 0, 4096),) for name in ("first", "main", "side")}, init=frozenset({"first"})
)


def shared(name: str = "a") -> PodBuilder:
    """A pod with an init container and two more that have shares."""
    made = pod(name).asking(mib=4096, container="first", init=True)
    made = made.asking(mib=4096, container="main").asking(mib=4096, container="side")
    return made.on("n1").assigned(text=assignment_to_json(SIZED))


def with_ids(one: PodBuilder, **ids: str) -> Pod:
    """With these containers in its status; `first` is an init container."""
    plain: dict[str, Any] = one.plain()
    statuses = {name: {"name": name, "containerID": text} for name, text in ids.items()}
    plain["status"]["initContainerStatuses"] = [of for name, of in statuses.items() if name == "first"]
    plain["status"]["containerStatuses"] = [of for name, of in statuses.items() if name != "first"]
    return msgspec.json.decode(msgspec.json.encode(plain), type=Pod)


class NodeWithGrants:
    def __init__(self, folder: Path) -> None:
        self.pods = NodePods(DEFAULT, 1024)
        self.grants = GrantDirectories(folder, folder / "none")
        self.ids = ContainerIds(self.pods, self.grants)

    def allocates(self, one: PodBuilder, container: str, unit: str, *, granted: bool = True) -> str:
        uid = one.build().uid
        record = Record((unit,), uid, "default", one.name, container, (uuid(0),), 0.0)
        self.grants.folder(record.key).mkdir(parents=True)
        self.grants.update(record)
        if granted:
            self.grants.write(record.key, grant_for(SIZED, container, namespace="default", pod=one.name, uid=uid))
        return record.key

    def shows(self, seen: Pod) -> None:
        self.pods.on_change(None, seen)
        self.ids.once()

    def id(self, key: str) -> str:
        return read_container_id(self.grants.folder(key) / CONTAINER_ID)


@pytest.fixture
def node(tmp_path: Path) -> NodeWithGrants:
    return NodeWithGrants(tmp_path)


def test_each_container_gets_its_own_once_the_status_has_it(node: NodeWithGrants) -> None:
    one = shared()
    main, side = node.allocates(one, "main", "x"), node.allocates(one, "side", "y")
    node.shows(with_ids(one, main="", side=f"cri-o://{Y}"))
    assert (node.id(main), node.id(side)) == ("", Y)
    node.shows(with_ids(one, main=f"containerd://{X}", side=f"cri-o://{Y}"))
    assert (node.id(main), node.id(side)) == (X, Y)


def test_a_container_that_starts_again_has_another_and_an_init_container_has_one(node: NodeWithGrants) -> None:
    one = shared()
    first = node.allocates(one, "first", "x")
    node.shows(with_ids(one, first=f"containerd://{X}"))
    assert node.id(first) == X
    node.shows(with_ids(one, first=f"containerd://{Y}"))
    assert node.id(first) == Y


def test_nothing_is_written_for_another_pod_or_before_the_grant_is_there(node: NodeWithGrants) -> None:
    one, other = shared(), shared("b")
    early, others = node.allocates(one, "main", "x", granted=False), node.allocates(other, "main", "y")
    node.shows(with_ids(one, main=f"containerd://{X}"))
    assert (node.id(early), node.id(others)) == ("", "")
    node.grants.write(early, grant_for(SIZED, "main", namespace="default", pod="a", uid=one.build().uid))
    node.ids.once()
    assert node.id(early) == X


def test_a_plugin_that_was_away_writes_what_it_missed(node: NodeWithGrants, tmp_path: Path) -> None:
    key = node.allocates(shared(), "main", "x")
    fresh = NodeWithGrants(tmp_path)
    fresh.shows(with_ids(shared(), main=f"containerd://{X}"))
    assert fresh.id(key) == X


def test_an_id_that_could_not_be_written_is_written_at_the_next_check(
    node: NodeWithGrants, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = node.allocates(shared(), "main", "x")

    def full(*_: object) -> bool:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as broken:
        broken.setattr(node.grants, "identify", full)
        with pytest.raises(OSError, match="No space"):
            node.shows(with_ids(shared(), main=f"containerd://{X}"))
    node.ids.once()
    assert node.id(key) == X


@pytest.mark.parametrize("text", ["", "containerd://", X, f"containerd://{X[1:]}", f"containerd://../{X}"])
def test_what_is_no_id_of_a_container_is_left_out(text: str) -> None:
    assert ids_of(with_ids(shared(), main=text)) == {}
    assert ids_of(with_ids(replace(shared()), main=f"containerd://{X}")) == {"main": X}

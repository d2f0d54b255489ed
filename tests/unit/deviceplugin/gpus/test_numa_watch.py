"""What the node publishes of the kubelet's alignment: from a kubelet that answers, a configuration and the kernel's folder of NUMA nodes."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest

from deviceplugin.gpus import numa_watch
from deviceplugin.gpus.numa_watch import NumaWatch, cpu_list, others_of, read_configuration, read_numa_nodes
from deviceplugin.gpus.offer import Offer
from deviceplugin.pod_resources import KubeletUnreachable
from deviceplugin.pods.node_pods import NodePods
from deviceplugin.settings import DevicePluginSettings
from tests.builders import gpu, pod, share
from tests.unit.deviceplugin.builders import inventory
from vgpu.api.errors import BadDocument
from vgpu.api.names import DEFAULT
from vgpu.api.numa import DeviceCount, NumaNode, facts_from_json
from vgpu_pb import podresources_pb2 as pb

SINGLE = {"topologyManagerPolicy": "single-numa-node", "cpuManagerPolicy": "static"}


class Kubelet:
    """Its pod resources API."""

    def __init__(self) -> None:
        self.answer = pb.AllocatableResourcesResponse(cpu_ids=[1, 2, 3, 4, 5, 6, 7])
        self.listed = pb.ListPodResourcesResponse()
        self.away = False

    async def machine(self) -> pb.AllocatableResourcesResponse:
        if self.away:
            raise KubeletUnreachable("away")
        return self.answer

    async def pods(self) -> Any:
        return self.listed.pod_resources

    def has(self, name: str, *cpus: int) -> None:
        self.listed.pod_resources.add(name=name, namespace="default").containers.add(name="c", cpu_ids=cpus)


def sysfs(folder: Path, *cpus: str) -> Path:
    for at, text in enumerate(cpus):
        (folder / f"node{at}").mkdir(parents=True)
        (folder / f"node{at}" / "cpulist").write_text(f"{text}\n")
        (folder / f"node{at}" / "distance").write_text("10 21\n" if at == 0 else "21 10\n")
    (folder / "online").write_text("0-1\n")
    (folder / "node-not").mkdir()
    return folder


class Node:
    """A watch, and what it stands on."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        self.config = folder / "config.yaml"
        self.offer, self.pods, self.kubelet, self.checks = Offer(DEFAULT, 1024), NodePods(DEFAULT, 1024), Kubelet(), 0
        self.offer.set_inventory(inventory(1))
        made = DevicePluginSettings(
            node_name="n",
            numa=True,
            numa_nodes_dir=sysfs(folder / "sys", "0-3", "4-7"),
            kubelet_config=self.config,
            **settings,
        )
        records: Any = self.kubelet
        self.watch = NumaWatch(made, self.offer, self.pods, records, self._changed)

    def _changed(self) -> None:
        self.checks += 1

    def configure(self, **fields: Any) -> None:
        self.config.write_text(json.dumps({"kind": "KubeletConfiguration", **fields}))


async def test_the_annotation_has_the_policy_and_the_free_cpus_of_each_numa_node(tmp_path: Path) -> None:
    node = Node(tmp_path)
    node.configure(**SINGLE, topologyManagerScope="pod")
    node.kubelet.has("other", 4, 5)
    await node.watch.once()
    text = node.watch.annotation()[DEFAULT.numa]
    assert text is not None
    facts = facts_from_json(text)
    assert (facts.policy, facts.scope, facts.exclusive_cpus) == ("single-numa-node", "pod", True)
    assert facts.nodes == (NumaNode(0, 4, 3), NumaNode(1, 4, 2))  # CPU 0 is reserved
    assert node.offer.names_numa
    assert node.checks == 1
    await node.watch.once()
    assert node.checks == 1


async def test_the_kubelets_answer_is_read_beside_the_event_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full node's names thousands of devices."""
    node, threads = Node(tmp_path), []

    def seen(*given: Any) -> Any:
        threads.append(threading.get_ident())
        return others_of(*given)

    monkeypatch.setattr(numa_watch, "others_of", seen)
    node.configure(**SINGLE)
    await node.watch.once()
    assert len(threads) == 1
    assert threading.get_ident() not in threads


@pytest.mark.parametrize("policy", ["none", "best-effort"])
async def test_nothing_is_published_or_named_where_the_kubelet_refuses_nothing(tmp_path: Path, policy: str) -> None:
    node = Node(tmp_path)
    node.configure(topologyManagerPolicy="restricted")
    await node.watch.once()
    assert node.offer.names_numa
    node.configure(topologyManagerPolicy=policy)
    await node.watch.once()
    assert node.watch.annotation() == {DEFAULT.numa: None}
    assert not node.offer.names_numa


async def test_what_is_not_known_leaves_the_annotation_as_it_is(tmp_path: Path) -> None:
    node = Node(tmp_path)
    await node.watch.once()
    assert node.watch.annotation() == {}
    assert "config.yaml" in node.watch.failing
    node.configure(**SINGLE)
    await node.watch.once()
    before = node.watch.annotation()
    node.kubelet.away = True
    node.kubelet.has("other", 4, 5)
    await node.watch.once()
    assert node.watch.annotation() == before != {}
    assert node.watch.failing == "away"


async def test_switched_off_the_annotation_should_not_be_there() -> None:
    settings = DevicePluginSettings(node_name="n")
    records: Any = Kubelet()
    watch = NumaWatch(settings, Offer(DEFAULT, 1024), NodePods(DEFAULT, 1024), records)
    await watch.run()
    assert watch.annotation() == {DEFAULT.numa: None}


async def test_fields_that_are_set_stand_in_the_place_of_the_file(tmp_path: Path) -> None:
    node = Node(tmp_path, kubelet_topology={"topologyManagerPolicy": "restricted"})
    await node.watch.once()
    assert node.offer.names_numa


async def test_a_pod_counts_once_it_has_started(tmp_path: Path) -> None:
    """Before that its name may be that of a pod before it."""
    node = Node(tmp_path)
    node.configure(**SINGLE)
    node.kubelet.has("a", 1)
    built = pod("a").asking(mib=1024).on("n").assigned(share(gpu(0), 1024))
    waiting = built.build()
    node.pods.on_change(None, waiting)
    await node.watch.once()
    assert facts_from_json(node.watch.annotation()[DEFAULT.numa] or "").counted == ()
    node.pods.on_change(waiting, built.with_phase("Running").build())
    await node.watch.once()
    assert facts_from_json(node.watch.annotation()[DEFAULT.numa] or "").counted == (waiting.uid,)


def test_devices_of_other_plugins_are_counted_by_numa_node() -> None:
    machine, listed = pb.AllocatableResourcesResponse(), pb.ListPodResourcesResponse()
    for resource, id_, *nodes in (
        ("nic", "a", 0),
        ("nic", "b", 1),
        ("wide", "c", 0, 1),
        ("flat", "d"),
        ("nic", "f", -1),
        ("lost", "g", 2),
        (DEFAULT.gpu, "e", 0),
    ):
        devices = machine.devices.add(resource_name=resource, device_ids=[id_])
        for one in nodes:
            devices.topology.nodes.add(ID=one)
    listed.pod_resources.add(name="p").containers.add().devices.add(resource_name="nic", device_ids=["b", "gone"])
    assert others_of(machine, listed.pod_resources, DEFAULT, (0, 1)) == {
        "nic": (DeviceCount(0, 1, 1), DeviceCount(1, 1, 0)), "wide": (),
    }  # fmt: skip


@pytest.mark.parametrize(("text", "cpus"), [("0-3,8\n", {0, 1, 2, 3, 8}), ("\n", set()), ("5", {5})])
def test_lists_of_cpus(text: str, cpus: set[int]) -> None:
    assert cpu_list(text) == cpus


@pytest.mark.parametrize("text", ["a", "0-", "1-b", "0-99999999999", "-3"])
def test_a_list_of_cpus_that_cannot_be_read(text: str) -> None:
    with pytest.raises(BadDocument, match="a list of CPUs is"):
        cpu_list(text)


def test_numa_nodes_with_their_cpus_and_distances(tmp_path: Path) -> None:
    cpus, distances = read_numa_nodes(sysfs(tmp_path / "sys", "0-1", ""))
    assert cpus == {0: {0, 1}, 1: set()}
    assert distances == {0: (10, 21), 1: (21, 10)}
    (tmp_path / "sys" / "node0" / "distance").write_bytes(b"10 \xff")
    with pytest.raises(BadDocument, match="should be numbers"):
        read_numa_nodes(tmp_path / "sys")
    with pytest.raises(BadDocument, match="no NUMA node"):
        read_numa_nodes(tmp_path)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("[", "YAML"),
        ("a: 2026-99-99", "YAML: month must be"),
        ("[" * 10_000, "YAML: maximum recursion"),
        ("a: 1", "no KubeletConfiguration"),
        ("x" * (1024 * 1024 + 1), "bytes"),
    ],
)
def test_a_configuration_that_cannot_be_read(tmp_path: Path, text: str, why: str) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(text)
    with pytest.raises(BadDocument, match=why):
        read_configuration(path)

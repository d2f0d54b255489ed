"""The NUMA nodes that a node of the local cluster sees: the device plugin reads them as the kernel's own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from deviceplugin.gpus.numa_watch import read_numa_nodes
from hack.cluster import numa, settings
from hack.cluster.layout import Layout
from vgpu.api.numa import kubelet_topology


@pytest.mark.parametrize(("cpus", "nodes"), [([0, 1], ([0], [1])), ([0, 1, 2, 5, 6], ([0, 1, 2], [5, 6]))])
def test_the_cpus_of_the_machine_are_in_two_halves(
    tmp_path: Path, cpus: list[int], nodes: tuple[list[int], ...]
) -> None:
    for _ in range(2):
        numa.write_folder(tmp_path / "node", cpus)
    found, distances = read_numa_nodes(tmp_path / "node")
    assert found == {at: set(half) for at, half in enumerate(nodes)}
    assert distances == {0: (10, 21), 1: (21, 10)}


def test_the_links_lead_to_the_kernels_cpus_where_the_folder_is_mounted(tmp_path: Path) -> None:
    (tmp_path / "cpu" / "cpu1" / "topology").mkdir(parents=True)
    numa.write_folder(tmp_path / "node", [0, 1])
    assert (tmp_path / "node" / "node1" / "cpu1" / "topology").is_dir()


def test_one_cpu_is_too_few() -> None:
    with pytest.raises(ValueError, match="two CPUs, and the machine has 1"):
        numa.halves([0])


def test_lists_of_the_kernel() -> None:
    assert numa.online("0-3,8\n") == [0, 1, 2, 3, 8]


@pytest.mark.parametrize("policy", numa.POLICIES)
def test_the_kubelets_configuration_has_the_policy_and_the_device_plugin_reads_it(policy: str) -> None:
    node = Layout(Path("/s")).node(1)
    found = kubelet_topology(json.loads(settings.kubelet(node, measures_storage=True, numa_policy=policy)))
    assert (found.policy, found.static_cpus, found.unpredictable) == (policy, policy != numa.NONE, "")


def test_a_node_without_a_file_has_no_policy(tmp_path: Path) -> None:
    node = Layout(tmp_path).node(1)
    assert numa.policy_of(node) == numa.NONE
    node.folder.mkdir(parents=True)
    node.numa_policy.write_text("restricted\n")
    assert numa.policy_of(node) == "restricted"

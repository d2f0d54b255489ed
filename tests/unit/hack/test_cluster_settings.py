"""The text that the cluster is started with."""

import json
import tomllib
from pathlib import Path

import pytest

from hack.cluster import settings
from hack.cluster.layout import NODE_FOLDERS, Layout


def test_every_node_has_an_address_ports_and_a_group_of_its_own() -> None:
    nodes = [Layout(Path("/s")).node(index) for index in range(1, 33)]
    texts = [json.loads(settings.kubelet(node, measures_storage=True)) for node in nodes]
    for key in ("port", "healthzPort", "cgroupRoot", "containerRuntimeEndpoint", "tlsCertFile"):
        assert len({text[key] for text in texts}) == len(nodes), key
    assert not {text["port"] for text in texts} & {text["healthzPort"] for text in texts}
    assert len({node.address for node in nodes}) == len(nodes)


def test_no_pod_gets_the_address_of_a_node() -> None:
    layout = Layout(Path("/s"))
    (pods,) = json.loads(settings.cni(layout))["plugins"][0]["ipam"]["ranges"][0]
    assert pods["gateway"] == layout.node(1).address
    assert pods["rangeStart"] == "10.201.1.0"
    assert layout.node(32).address == "10.201.0.32"


def test_containerd_reads_cdi_specs_and_offers_both_runtimes() -> None:
    text = tomllib.loads(settings.containerd(Layout(Path("/s")).node(1), "/usr/sbin/runc", "overlayfs"))
    runtime = text["plugins"]["io.containerd.cri.v1.runtime"]
    assert runtime["enable_cdi"] is True
    names = {name: options["options"]["BinaryName"] for name, options in runtime["containerd"]["runtimes"].items()}
    assert names == {"runc": "/usr/sbin/runc", "nvidia": "/s/bin/nvidia-container-runtime"}


def test_nvidias_runtime_reads_the_same_cdi_folders_as_containerd() -> None:
    nvidia = tomllib.loads(settings.nvidia_runtime("/usr/sbin/runc"))["nvidia-container-runtime"]
    containerd = tomllib.loads(settings.containerd(Layout().node(1), "/usr/sbin/runc", "native"))
    assert nvidia["mode"] == "cdi"
    assert nvidia["modes"]["cdi"]["spec-dirs"] == containerd["plugins"]["io.containerd.cri.v1.runtime"]["cdi_spec_dirs"]


def test_the_sockets_of_the_last_node_fit_the_length_that_the_kernel_takes() -> None:
    assert len(str(Layout().node(32).containerd_socket)) < 108
    assert "/var/lib/kubelet" in NODE_FOLDERS


def test_an_unknown_node_is_refused_with_the_names_of_those_that_are(tmp_path: Path) -> None:
    layout = Layout(tmp_path)
    (tmp_path / "nodes" / "node2").mkdir(parents=True)
    with pytest.raises(LookupError, match="'node7': the nodes are node2"):
        layout.node_named("node7")

"""The paths of everything of the cluster, and the addresses at which it answers.

Only paths, names and numbers are decided here; nothing is read, written or started.
"""

from __future__ import annotations

import ipaddress
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Final

STATE: Final = Path("/var/lib/tangram-cluster")
"""Default state folder. Short on purpose: the path of a unix socket may have 107 bytes."""

MAX_NODES: Final = 32
"""Real kubelets on one machine. Guessed: each takes about 150 MB with its containerd; past that, simulate nodes."""

POD_NETWORK: Final = ipaddress.IPv4Network("10.201.0.0/16")
SERVICE_NETWORK: Final = ipaddress.IPv4Network("10.96.0.0/16")
API_SERVICE_ADDRESS: Final = str(SERVICE_NETWORK[1])
DNS_SERVICE_ADDRESS: Final = str(SERVICE_NETWORK[10])
API_PORT: Final = 6443
ETCD_PORT: Final = 12379
ETCD_PEER_PORT: Final = 12380

NODE_FOLDERS: Final = (
    "/etc/cdi",
    "/etc/nvidia-container-runtime",
    "/opt/tangram",
    "/run/cdi",
    "/run/containerd",
    "/run/nvidia-container-toolkit",
    "/var/lib/cni",
    "/var/lib/kubelet",
    "/var/lib/tangram",
    "/var/lib/tangram-fake-driver",
    "/var/log/containers",
    "/var/log/pods",
)
"""Folders that are each node's own. The host's folders of the same names stay as they are, and unseen by the node."""


@dataclass(frozen=True, slots=True)
class NodeLayout:
    """One node: `index` counts from 1."""

    cluster: Layout
    index: int

    @property
    def name(self) -> str:
        return f"node{self.index}"

    @property
    def address(self) -> str:
        """The node's InternalIP; the first one is the gateway of every pod too."""
        return str(POD_NETWORK[self.index])

    @property
    def kubelet_port(self) -> int:
        return 10250 + 10 * (self.index - 1)

    @property
    def kubelet_health_port(self) -> int:
        return 10248 + 10 * (self.index - 1)

    @property
    def folder(self) -> Path:
        return self.cluster.state / "nodes" / self.name

    @property
    def containerd_socket(self) -> Path:
        return self.folder / "containerd.sock"

    @property
    def mounted(self) -> Path:
        """Appears when the mount namespace is complete."""
        return self.folder / "mounted"

    @property
    def loaded(self) -> Path:
        """Book of the image archives that were imported."""
        return self.folder / "loaded.json"

    @property
    def numa_policy(self) -> Path:
        """Names the policy of the kubelet's TopologyManager, where it is another than none (`hack.cluster.numa`)."""
        return self.folder / "numa-policy"

    @property
    def numa_nodes(self) -> Path:
        """What is then mounted in place of the kernel's NUMA nodes."""
        return self.folder / "numa-nodes"

    def own(self, folder: str) -> Path:
        """What the node sees at `folder`, as the host sees it."""
        return self.folder / "root" / folder.removeprefix("/")

    def process(self, program: str) -> str:
        return f"{program}-{self.name}"


@dataclass(frozen=True, slots=True)
class Layout:
    """The state folder of one cluster."""

    state: Path = STATE

    @property
    def bin(self) -> Path:
        return self.state / "bin"

    @property
    def pki(self) -> Path:
        return self.state / "pki"

    @property
    def logs(self) -> Path:
        return self.state / "logs"

    @property
    def run(self) -> Path:
        return self.state / "run"

    @property
    def settings(self) -> Path:
        return self.state / "settings"

    @property
    def kubeconfig(self) -> Path:
        """The administrator's."""
        return self.state / "kubeconfig"

    @property
    def provider(self) -> Path:
        return self.state / "provider"

    @property
    def made_folders(self) -> Path:
        """Names the empty folders that were made on the host to mount nodes' folders over."""
        return self.state / "made-folders"

    def node(self, index: int) -> NodeLayout:
        return NodeLayout(self, index)

    def nodes(self) -> list[NodeLayout]:
        """Nodes that have been started at some time, first to last."""
        folders = (self.state / "nodes").glob("node*")
        return [self.node(index) for index in sorted(int(folder.name.removeprefix("node")) for folder in folders)]

    def node_named(self, name: str) -> NodeLayout:
        for node in self.nodes():
            if node.name == name:
                return node
        raise LookupError(f"node {name!r}: the nodes are {', '.join(n.name for n in self.nodes()) or 'none'}")


def cache_folder() -> Path:
    """Where built programs and images are kept between clusters."""
    named = os.environ.get("TANGRAM_CACHE")
    if named:
        return Path(named)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tangram"


def current_images() -> Path:
    """Links to the archives of the images as their sources are now; each build of images updates them."""
    return cache_folder() / "images" / "current"

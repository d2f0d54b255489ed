"""The text of every settings file. Pure: layouts in, text out.

YAML is written as JSON, which every reader of YAML takes. Choices that are not plain:

- cgroup v1 is allowed, and KubeletInUserNamespace with `restrict_oom_score_adj` lets root without CAP_SYS_RESOURCE start pods;
- enforceNodeAllocatable is empty since no group is reserved for the system on a machine that does other work too;
- images are never collected as garbage: they were imported by hand, and cannot be pulled again;
- PTP networking (see `network`) keeps its address book in one place for all nodes, so pods' addresses are unique.
"""

from __future__ import annotations

import json
from typing import Any

from hack.cluster import numa
from hack.cluster.cgroups import GROUP
from hack.cluster.layout import DNS_SERVICE_ADDRESS, MAX_NODES, POD_NETWORK, Layout, NodeLayout

PAUSE_IMAGE = "localhost/pause:1"
CNI_PLUGINS = "/usr/lib/cni"


def _text(content: dict[str, Any]) -> str:
    return json.dumps(content, indent=1) + "\n"


def kubelet(node: NodeLayout, *, measures_storage: bool, numa_policy: str = numa.NONE) -> str:
    """`measures_storage`: the node's disk is one whose use the kubelet can read; without, it would not start on some. `numa_policy`: of its TopologyManager."""
    pki = node.cluster.pki
    content: dict[str, Any] = {
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "address": "0.0.0.0",
        "port": node.kubelet_port,
        "healthzBindAddress": "127.0.0.1",
        "healthzPort": node.kubelet_health_port,
        "authentication": {
            "anonymous": {"enabled": False},
            "webhook": {"enabled": True},
            "x509": {"clientCAFile": str(pki / "ca.crt")},
        },
        "authorization": {"mode": "Webhook"},
        "tlsCertFile": str(pki / f"{node.name}.crt"),
        "tlsPrivateKeyFile": str(pki / f"{node.name}.key"),
        "containerRuntimeEndpoint": f"unix://{node.containerd_socket}",
        "cgroupDriver": "cgroupfs",
        "cgroupRoot": f"/{GROUP}/{node.name}",
        "cgroupsPerQOS": True,
        "enforceNodeAllocatable": [],
        "failCgroupV1": False,
        "failSwapOn": False,
        "featureGates": {"KubeletInUserNamespace": True},
        "localStorageCapacityIsolation": measures_storage,
        "makeIPTablesUtilChains": False,
        "clusterDNS": [DNS_SERVICE_ADDRESS],
        "clusterDomain": "cluster.local",
        "resolvConf": "",
        "evictionHard": dict.fromkeys(("nodefs.available", "nodefs.inodesFree", "imagefs.available"), "1%")
        | {"memory.available": "50Mi"},
        "imageGCHighThresholdPercent": 100,
        "nodeStatusUpdateFrequency": "2s",
        "syncFrequency": "5s",
        "maxPods": 200,
        "serializeImagePulls": False,
        "registerWithTaints": [],
        "shutdownGracePeriod": "0s",
        # tests kill a container again and again: how long Kubernetes then waits is not what they measure
        "crashLoopBackOff": {"maxContainerRestartPeriod": "1s"},
    }
    return _text(content | numa.kubelet_fields(numa_policy))


def proxy(layout: Layout) -> str:
    """kube-proxy runs once, on the host: its rules serve every node's pods."""
    content = {
        "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
        "kind": "KubeProxyConfiguration",
        "mode": "iptables",
        "clientConnection": {"kubeconfig": str(layout.settings / "proxy.kubeconfig")},
        "clusterCIDR": str(POD_NETWORK),
        "hostnameOverride": layout.node(1).name,
        "bindAddress": "127.0.0.1",
        "conntrack": {"maxPerCore": 0, "min": 0, "tcpEstablishedTimeout": "0s", "tcpCloseWaitTimeout": "0s"},
    }
    return _text(content)


def cni(layout: Layout) -> str:
    """One file for all nodes. Addresses up to `MAX_NODES` are the nodes' own."""
    pods = {
        "subnet": str(POD_NETWORK),
        "rangeStart": str(POD_NETWORK[256]),
        "gateway": str(POD_NETWORK[1]),
    }
    assert MAX_NODES < 256
    address_book = {
        "type": "host-local",
        "ranges": [[pods]],
        "routes": [{"dst": "0.0.0.0/0"}],
        "dataDir": str(layout.state / "pod-addresses"),
    }
    plugins = [
        {"type": "ptp", "ipMasq": False, "ipam": address_book},
        {"type": "portmap", "capabilities": {"portMappings": True}},
    ]
    return _text({"cniVersion": "1.0.0", "name": "tangram", "plugins": plugins})


def containerd(node: NodeLayout, runc: str, snapshotter: str) -> str:
    """TOML. The runtime `nvidia` is there beside `runc`; only pods of RuntimeClass nvidia get it."""
    state = node.folder / "containerd"
    nvidia = node.cluster.bin / "nvidia-container-runtime"
    return f"""version = 3
root = "{state}"
state = "/run/containerd"
oom_score = 0

[grpc]
address = "{node.containerd_socket}"

[plugins."io.containerd.cri.v1.images"]
snapshotter = "{snapshotter}"
[plugins."io.containerd.cri.v1.images".pinned_images]
sandbox = "{PAUSE_IMAGE}"

[plugins."io.containerd.cri.v1.runtime"]
restrict_oom_score_adj = true
netns_mounts_under_state_dir = true
enable_cdi = true
cdi_spec_dirs = ["/etc/cdi", "/var/run/cdi"]
[plugins."io.containerd.cri.v1.runtime".cni]
bin_dirs = ["{CNI_PLUGINS}"]
conf_dir = "{node.cluster.settings / "cni"}"
[plugins."io.containerd.cri.v1.runtime".containerd]
default_runtime_name = "runc"
{_runtime("runc", runc)}{_runtime("nvidia", str(nvidia))}"""


def _runtime(name: str, program: str) -> str:
    table = f'plugins."io.containerd.cri.v1.runtime".containerd.runtimes.{name}'
    return f"""[{table}]
runtime_type = "io.containerd.runc.v2"
[{table}.options]
BinaryName = "{program}"
SystemdCgroup = false
"""


def nvidia_runtime(runc: str) -> str:
    """NVIDIA's container runtime in CDI mode: it reads NVIDIA_VISIBLE_DEVICES and injects what the CDI spec lists."""
    return f"""[nvidia-container-runtime]
debug = "/run/nvidia-container-toolkit/runtime.log"
log-level = "info"
mode = "cdi"
runtimes = ["{runc}"]
[nvidia-container-runtime.modes.cdi]
default-kind = "nvidia.com/gpu"
annotation-prefixes = ["cdi.k8s.io/"]
spec-dirs = ["/etc/cdi", "/var/run/cdi"]
"""

"""Give a node's kubelet two NUMA nodes, and a TopologyManager that refuses pods which it cannot align.

The kubelet and the device plugin read NUMA nodes from /sys/devices/system/node. In the node's mount namespace another folder is mounted there, which
has the machine's own CPUs in two halves: what the kubelet pins a container to has to exist. Its CPU manager then gives whole CPUs away, except the first one.

Which policy a node has is in a file of its folder, so that a restart keeps it.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

from hack.cluster.layout import NodeLayout

PLACE: Final = Path("/sys/devices/system/node")
CPUS: Final = Path("/sys/devices/system/cpu/online")
NONE: Final = "none"
POLICIES: Final = (NONE, "restricted", "single-numa-node")
MARK: Final = "two-numa-nodes"
"""A file that only the mounted folder has."""
MEMORY_KIB: Final = 4 * 2**20
"""Of each NUMA node, as the folder says. Nothing is limited by it."""


def policy_of(target: NodeLayout) -> str:
    """One of `POLICIES`."""
    return target.numa_policy.read_text().strip() if target.numa_policy.exists() else NONE


def halves(cpus: Sequence[int]) -> tuple[list[int], list[int]]:
    """The CPUs of both NUMA nodes."""
    if len(cpus) < 2:
        raise ValueError(f"two NUMA nodes: they need two CPUs, and the machine has {len(cpus)}")
    middle = (len(cpus) + 1) // 2
    return list(cpus[:middle]), list(cpus[middle:])


def online(text: str) -> list[int]:
    """The CPUs of a list of the kernel, as `0-3,8`."""
    found: list[int] = []
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        found += range(int(first), int(last or first) + 1)
    return found


def write_folder(folder: Path, cpus: Sequence[int]) -> None:
    """What is mounted at `PLACE`. The links to the CPUs lead to the kernel's own from there."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / MARK).touch()
    for at, half in enumerate(halves(cpus)):
        one = folder / f"node{at}"
        one.mkdir(exist_ok=True)
        (one / "cpulist").write_text(f"{','.join(map(str, half))}\n")
        (one / "distance").write_text("10 21\n" if at == 0 else "21 10\n")
        (one / "meminfo").write_text(f"Node {at} MemTotal: {MEMORY_KIB} kB\n")
        for cpu in half:
            link = one / f"cpu{cpu}"
            link.unlink(missing_ok=True)
            link.symlink_to(f"../../cpu/cpu{cpu}")


def kubelet_fields(policy: str) -> dict[str, Any]:
    """Of its configuration. Less than one CPU is reserved, which the CPU manager rounds up and kube-scheduler does not."""
    if policy == NONE:
        return {}
    return {
        "topologyManagerPolicy": policy,
        "topologyManagerScope": "container",
        "cpuManagerPolicy": "static",
        "cpuManagerReconcilePeriod": "1s",
        "systemReserved": {"cpu": "10m"},
    }


def mount(target: NodeLayout, inside: Callable[[list[str]], list[str]]) -> None:
    """Make the node see the NUMA nodes that its policy needs. `inside`: a command, as it runs in the node's mount namespace."""
    mounted = subprocess.run(inside(["test", "-e", str(PLACE / MARK)]), check=False).returncode == 0
    wanted = policy_of(target) != NONE
    if wanted:
        write_folder(target.numa_nodes, online(CPUS.read_text()))
    if wanted and not mounted:
        subprocess.run(inside(["mount", "--bind", str(target.numa_nodes), str(PLACE)]), check=True)
    if mounted and not wanted:
        subprocess.run(inside(["umount", str(PLACE)]), check=True)

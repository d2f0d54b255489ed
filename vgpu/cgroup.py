"""Which pod a process belongs to, by the text of /proc/<pid>/cgroup. Pure.

The kubelet makes one cgroup for each pod and writes the pod's UID into its name. Only the node can move a process out of it, so
this attribution holds whatever the process does. Formats (kubelet, cgroup_manager_linux.go, Kubernetes 1.36):

    systemd    .../kubepods-burstable-pod1b2c3d4e_...._....slice/cri-containerd-<id>.scope    dashes of the UID as underscores
    cgroupfs   .../kubepods/burstable/pod1b2c3d4e-....-..../<container id>

Version 2 has one line, `0::<path>`; version 1 has one line for each hierarchy. A reader in a cgroup namespace of its own sees paths
that begin with `/../`: the name of the pod's cgroup is in them all the same. A static pod has the hash of its manifest as UID.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

_UID: Final = r"[0-9a-f]{8}(?:[-_][0-9a-f]{4}){3}[-_][0-9a-f]{12}|[0-9a-f]{32}"
_POD: Final = re.compile(rf"(?:.*-)?pod({_UID})(?:\.slice)?\Z")


def pods_of(text: str) -> tuple[str, ...]:
    """UIDs of the pods whose cgroup the process is in, the outermost first; empty for a process of the node's own.

    More than one where a node runs inside a pod of another cluster, or where a process made a cgroup that is named like a pod's:
    the outermost that is a pod of this node is the one that the kubelet made.
    """
    found: dict[str, None] = {}
    for path in _paths(text):
        for name in path.split("/"):
            if match := _POD.match(name):
                found[match[1].replace("_", "-")] = None
    return tuple(found)


def _paths(text: str) -> Iterator[str]:
    """The path of each hierarchy."""
    for line in text.splitlines():
        fields = line.split(":", 2)
        if len(fields) == 3:
            yield fields[2]

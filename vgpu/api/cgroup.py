"""Which pod and container a process belongs to, by the text of /proc/<pid>/cgroup. Pure.

The kubelet makes one cgroup for each pod and writes the pod's UID into its name; the container runtime makes one in it for each container.
Only the node can move a process out of them, so this attribution is right whatever the process does.

    pod, systemd driver      kubepods[-burstable|-besteffort]-pod<UID, dashes as underscores>.slice
    pod, cgroupfs driver     kubepods[/burstable|/besteffort]/pod<UID>
    container, containerd    cri-containerd-<ID>.scope; cgroupfs: <ID>
    container, CRI-O         crio-<ID>.scope, with crun and a cgroup `container` in it; cgroupfs: crio-<ID>
    container, cri-dockerd   docker-<ID>.scope; cgroupfs: <ID>
    both at once             kubepods-burstable-pod<UID>.slice:cri-containerd:<ID>, below /system.slice/containerd.service

Sources: kubelet cm/pod_container_manager_linux.go and cgroup_manager_linux.go (a Guaranteed pod lies beside the two other classes; `cgroupRoot`
and kind put `kubelet` before `kubepods`); containerd internal/cri/server/helpers_linux.go, getCgroupsPath; CRI-O
internal/config/cgmgr (systemd.go, cgroupfs.go); crun libcrun/cgroup-systemd.c; cri-dockerd core/helpers_linux.go. The last form is what runc
makes of a systemd path where containerd lacks `SystemdCgroup = true` and the kubelet has it (opencontainers/runc, docs/systemd.md).

Version 2 of cgroups has one line, `0::<path>`; version 1 has one for each hierarchy. A reader in a cgroup namespace of its own sees paths that
begin with `/../`, once for each level up to the common ancestor (cgroup_namespaces(7)): below it they are the same. A static pod has the MD5
of its manifest as UID, without dashes (kubelet config/common.go). A cgroup that was removed ends in ` (deleted)`.

A container may make cgroups of its own in its cgroup, and name them like another pod's or container's. They lie below its own, so the outermost
name decides. Where the node itself runs inside a pod, as kind does in a CI job, the outermost names are the job's: how many names stand before
the node's own pods `depth_of` derives from the reader's cgroup, as the reader is in a pod of this node.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

UID: Final = r"[0-9a-f]{8}(?:[-_][0-9a-f]{4}){3}[-_][0-9a-f]{12}|[0-9a-f]{32}"
"""Of a pod, as a regular expression: in the name of a cgroup, behind `pod`."""
_ID: Final = r"[0-9a-f]{64}"
_POD: Final = re.compile(rf"(?:.*-)?pod({UID})(?:\.slice)?(?::[a-z-]+:({_ID}))?\Z")
_CONTAINER: Final = re.compile(rf"(?:cri-containerd-|crio-|docker-)?({_ID})(?:\.scope)?\Z")
_DELETED: Final = " (deleted)"


@dataclass(frozen=True, slots=True)
class CgroupOwner:
    """Where a process is. Empty = its cgroup does not show it."""

    pod: str = ""
    """UID, as the API server writes it."""
    container: str = ""
    """The runtime's ID, as the pod's containerStatuses have it behind `://`. Empty also for a process in the pod's own cgroup."""


NOWHERE: Final = CgroupOwner()


def is_container_id(text: str) -> bool:
    """Is this what containerd, CRI-O and cri-dockerd call a container?"""
    return re.fullmatch(_ID, text) is not None


def place_of(text: str, depth: int = 0) -> CgroupOwner:
    """The place of a process of this node; `NOWHERE` for one that is in no pod. `depth`: as `depth_of` the reader's own text.

    Of the hierarchies of version 1, the first that names a container counts, else the first that names a pod.
    """
    places = [places[depth] for places in map(_places, _paths(text)) if len(places) > depth]
    return next((place for place in places if place.container), places[0] if places else NOWHERE)


def depth_of(own: str) -> int:
    """How many pods of other nodes the paths of this node's pods name first. `own`: the reader's own /proc/self/cgroup."""
    return max((len(_places(path)) - 1 for path in _paths(own) if _places(path)), default=0)


def _places(path: str) -> list[CgroupOwner]:
    """One for each pod that a path names, the outermost first. The name of a container stands right behind its pod's."""
    names = path.removesuffix(_DELETED).split("/")
    places = []
    for name, inner in zip(names, [*names[1:], ""], strict=True):
        if pod := _POD.match(name):
            container = _CONTAINER.match(inner)
            places.append(CgroupOwner(pod[1].replace("_", "-"), pod[2] or (container[1] if container else "")))
    return places


def _paths(text: str) -> Iterator[str]:
    """The path of each hierarchy."""
    for line in text.splitlines():
        fields = line.split(":", 2)
        if len(fields) == 3:
            yield fields[2]

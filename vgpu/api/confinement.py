"""Find what in a pod leads around the limits of a GPU share: rights of its containers, folders of the node in its volumes.

Pure: takes what a container may do and which folders a pod mounts, answers with a reason or with nothing. It judges what the
kernel lets a process do to its node, not what a pod is for. Pods without a share are not checked here: the driver and the
hardware enforce the limits of a whole GPU or a MIG instance, not our library.

What is no way out, and so is left alone
    SYS_PTRACE, PERFMON    reach processes of the pod's own process namespace, which are the container's own (hostPID is judged itself)
    NET_ADMIN, hostNetwork no way to the GPU or to the arbiter leads over a network
    hostIPC                shared memory of the node, not GPU memory
    MKNOD, SYS_CHROOT      container runtimes give them to every container: a node that was made still cannot be opened (device cgroup)
"""

from __future__ import annotations

import posixpath
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

CAPABILITIES: Final[dict[str, str]] = {
    "ALL": "every right there is",
    "SYS_ADMIN": "it may unmount the library and mount over it",
    "SYS_MODULE": "it may load code into the kernel",
    "SYS_RAWIO": "it may reach devices past their drivers",
    "DAC_READ_SEARCH": "it may open any file of the node by its handle, other containers' grants among them",
    "BPF": "it may run programs in the kernel, which see every process",
}
"""Capability -> why it is a way out. From capabilities(7)."""

NODE_FOLDERS: Final[dict[str, str]] = {
    "/dev": "device nodes, those of every GPU among them",
    "/proc": "every process of the node and, through it, every file",
    "/sys": "the cgroups of containers, and the memory of PCI devices",
    "/etc/cdi": "what container runtimes put into containers",
    "/etc/kubernetes": "pods that the kubelet starts without the API server",
    "/run/containerd": "the container runtime's socket",
    "/run/crio": "the container runtime's socket",
    "/run/docker.sock": "the container runtime's socket",
    "/run/docker": "the container runtime's socket",
    "/run/cri-dockerd.sock": "the container runtime's socket",
    "/run/podman": "the container runtime's socket",
    "/run/k3s": "the container runtime's socket",
    "/var/lib/containerd": "file systems of other containers",
    "/var/lib/containers": "file systems of other containers",
    "/var/lib/docker": "file systems of other containers",
    "/var/lib/rancher": "the container runtime and its configuration",
}
"""Folder or socket of every node -> what is there. Guessed to be all that widely used distributions have."""

HARMLESS: Final = ("/dev/shm", "/dev/hugepages", "/dev/infiniband")  # noqa: S108 - folders of the node, not ours
"""Below a folder of the node and without a GPU; programs that use RDMA mount them."""


@dataclass(frozen=True, slots=True)
class Rights:
    """What a container may do beyond an ordinary one."""

    privileged: bool = False
    capabilities: tuple[str, ...] = ()
    """Added ones, with or without CAP_, in any case of letters."""
    unmasked: bool = False
    """It sees /proc without the runtime's masks."""


def way_out(rights: Rights) -> str | None:
    """Why these rights lead around the limits of a share, as the end of a sentence about a container; None when they do not."""
    if rights.privileged:
        return "is privileged"
    for capability in rights.capabilities:
        why = CAPABILITIES.get(capability.upper().removeprefix("CAP_"))
        if why:
            return f"adds the capability {capability} ({why})"
    return "has procMount Unmasked (it may change settings of the node's kernel)" if rights.unmasked else None


def folder_behind(path: str, folders: Mapping[str, str]) -> str | None:
    """Which of `folders` a hostPath shows, because it is one, is in one or has one below it; None when it shows none."""
    shown = _clean(path)
    if any(_within(shown, harmless) for harmless in HARMLESS):
        return None
    around = [folder for folder in folders if _within(shown, _clean(folder))]
    below = (folder for folder in folders if _within(_clean(folder), shown))
    return max(around, key=len) if around else next(below, None)


def _within(path: str, folder: str) -> bool:
    return path == folder or path.startswith(folder.rstrip("/") + "/")


def _clean(path: str) -> str:
    """One spelling for a path. /var/run is a link to /run on every distribution with systemd."""
    clean = posixpath.normpath("/" + path.lstrip("/"))
    return clean.removeprefix("/var") if _within(clean, "/var/run") else clean

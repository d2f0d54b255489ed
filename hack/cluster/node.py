"""One node: its mount namespace, its containerd, its kubelet.

The namespace is held by a process that sleeps, so containerd and the kubelet can be restarted one by one, as tests do.
Inside, each of `layout.NODE_FOLDERS` is the node's own folder from `<node>/root`, mounts are shared among the node's own
mount namespaces only, and the rest of the file system is the host's.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
from pathlib import Path

from hack.cluster import cgroups, network, numa, pki, processes, settings
from hack.cluster.layout import NODE_FOLDERS, Layout, NodeLayout
from hack.cluster.processes import Program

PROGRAMS = ("kubelet", "containerd", "namespace")
"""In the order of stopping."""


def start_runtime(node: NodeLayout) -> None:
    """The namespace and containerd; returns when containerd's socket is there."""
    _prepare(node)
    processes.start(node.cluster, _namespace(node))
    processes.wait_until_exists(node.mounted, timeout_s=10)
    numa.mount(node, lambda command: inside(node, command))
    processes.start(node.cluster, _containerd(node))
    processes.wait_until_exists(node.containerd_socket, timeout_s=30)


def start_kubelet(node: NodeLayout) -> None:
    processes.start(node.cluster, _kubelet(node))


def align(node: NodeLayout, policy: str) -> None:
    """Restart the node's kubelet with this policy of TopologyManager, one of `numa.POLICIES`; pods stay."""
    if policy not in numa.POLICIES:
        raise ValueError(f"policy {policy!r}: it must be one of {', '.join(numa.POLICIES)}")
    processes.stop(node.cluster, node.process("kubelet"))
    node.numa_policy.write_text(f"{policy}\n")
    # a CPU manager does not start with what one of another policy wrote down
    (node.own("/var/lib/kubelet") / "cpu_manager_state").unlink(missing_ok=True)
    numa.mount(node, lambda command: inside(node, command))
    _write_kubelet_settings(node)
    start_kubelet(node)


def _write_kubelet_settings(node: NodeLayout) -> None:
    text = settings.kubelet(node, measures_storage=on_disk(node.folder), numa_policy=numa.policy_of(node))
    (node.folder / "kubelet.json").write_text(text)


def _prepare(node: NodeLayout) -> None:
    for folder in NODE_FOLDERS:
        node.own(folder).mkdir(parents=True, exist_ok=True)
        _make_mount_point(node.cluster, Path(folder))
    if processes.pid_of(node.cluster, node.process("namespace")) is None:
        node.mounted.unlink(missing_ok=True)
    if processes.pid_of(node.cluster, node.process("containerd")) is None:
        node.containerd_socket.unlink(missing_ok=True)
    network.add_address(node.index, node.address)
    cgroups.make(f"{cgroups.GROUP}/{node.name}")
    pki.make_certificate(node.cluster.pki, pki.node_identity(node.name, node.address))
    pki.write_kubeconfig(node.cluster, node.name, node.folder / "kubelet.kubeconfig")
    runc = find_runc()
    (node.folder / "containerd.toml").write_text(settings.containerd(node, runc, snapshotter(node.folder)))
    _write_kubelet_settings(node)
    (node.own("/etc/nvidia-container-runtime") / "config.toml").write_text(settings.nvidia_runtime(runc))


def _make_mount_point(layout: Layout, folder: Path) -> None:
    """Make the folder on the host if it is missing, and write down every folder made, so that `down` removes them."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    with layout.made_folders.open("a") as book:
        for path in reversed(missing):
            path.mkdir()
            book.write(f"{path}\n")


def find_runc() -> str:
    """NVIDIA's runtime finds its low-level runtime by this path."""
    found = shutil.which("runc", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin")
    if found is None:
        raise LookupError("runc: not in PATH, /usr/sbin or /usr/local/sbin")
    return found


def snapshotter(folder: Path) -> str:
    """overlayfs where the kernel lets it stand on the folder's file system, else plain copies."""
    trial = folder / "overlay-trial"
    for name in ("lower", "upper", "work", "merged"):
        (trial / name).mkdir(parents=True, exist_ok=True)
    options = f"lowerdir={trial}/lower,upperdir={trial}/upper,workdir={trial}/work"
    mount = ["mount", "-t", "overlay", "overlay", "-o", options, str(trial / "merged")]
    works = subprocess.run(mount, capture_output=True, check=False).returncode == 0
    if works:
        subprocess.run(["umount", str(trial / "merged")], check=True)
    shutil.rmtree(trial)
    return "overlayfs" if works else "native"


def on_disk(folder: Path) -> bool:
    """Is the folder on a file system of a disk, not an overlay as in a container?"""
    command = ["stat", "--file-system", "--format=%T", str(folder)]
    kind = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    return kind in {"ext2/ext3", "xfs", "btrfs"}


def _namespace(node: NodeLayout) -> Program:
    mounts = [f"mount --bind {shlex.quote(str(node.own(f)))} {shlex.quote(f)}" for f in NODE_FOLDERS]
    script = "\n".join(
        ["set -e", "mount --make-rshared /", *mounts, f"touch {shlex.quote(str(node.mounted))}", "exec sleep infinity"]
    )
    command = ["unshare", "--mount", "--propagation", "private", "sh", "-c", script]
    return Program(node.process("namespace"), command)


def inside(node: NodeLayout, command: list[str]) -> list[str]:
    """The command, run in the node's mount namespace."""
    holder = processes.pid_of(node.cluster, node.process("namespace"))
    if holder is None:
        raise LookupError(f"node {node.name}: does not run")
    return ["nsenter", f"--mount=/proc/{holder}/ns/mnt", "--", *command]


def _path(layout: Layout) -> dict[str, str]:
    return {"PATH": f"{layout.bin}:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"}


def _containerd(node: NodeLayout) -> Program:
    command = [str(node.cluster.bin / "containerd"), "--config", str(node.folder / "containerd.toml")]
    return Program(node.process("containerd"), inside(node, command), _path(node.cluster))


def _kubelet(node: NodeLayout) -> Program:
    command = [
        str(node.cluster.bin / "kubelet"),
        f"--config={node.folder / 'kubelet.json'}",
        f"--kubeconfig={node.folder / 'kubelet.kubeconfig'}",
        f"--hostname-override={node.name}",
        f"--node-ip={node.address}",
        "--root-dir=/var/lib/kubelet",
        "--v=2",
    ]
    return Program(node.process("kubelet"), inside(node, command), _path(node.cluster))


def stop(node: NodeLayout) -> None:
    """Stop the node and everything that it started, pods included."""
    processes.stop(node.cluster, node.process("kubelet"), timeout_s=2)
    processes.end(cgroups.processes(f"{cgroups.GROUP}/{node.name}"), timeout_s=0)
    processes.stop(node.cluster, node.process("containerd"), timeout_s=2)
    processes.end(_in_namespace_of(node), timeout_s=0)
    processes.stop(node.cluster, node.process("namespace"), timeout_s=0)
    network.remove_address(node.index)


def _in_namespace_of(node: NodeLayout) -> list[int]:
    """Processes in the node's mount namespace: what is left of it are the shims, which outlive containerd by design."""
    holder = processes.pid_of(node.cluster, node.process("namespace"))
    if holder is None:
        return []
    theirs = str(Path(f"/proc/{holder}/ns/mnt").readlink())
    return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit() and _mounts(entry) == theirs]


def _mounts(process: Path) -> str | None:
    try:
        return str((process / "ns" / "mnt").readlink())
    except OSError:
        return None

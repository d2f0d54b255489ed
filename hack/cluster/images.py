"""Bring image archives into every node's containerd."""

from __future__ import annotations

import subprocess
from pathlib import Path

from hack.cluster import archive, processes
from hack.cluster.layout import Layout, NodeLayout
from hack.cluster.settings import PAUSE_IMAGE


def load_into(target: NodeLayout, path: Path) -> None:
    """Import one archive (OCI or Docker) under the names that it carries."""
    command = [str(target.cluster.bin / "ctr"), "--address", str(target.containerd_socket), "--namespace", "k8s.io"]
    command += ["images", "import", str(path.resolve())]
    answer = subprocess.run(command, capture_output=True, text=True, check=False)
    if answer.returncode:
        raise RuntimeError(f"{path}: not imported to {target.name}: {(answer.stderr or answer.stdout).strip()[-1000:]}")


def load(layout: Layout, path: Path) -> list[str]:
    """Import the archive to every node that runs. Returns the nodes' names."""
    running = [n for n in layout.nodes() if processes.pid_of(layout, n.process("containerd")) is not None]
    if not running:
        raise LookupError(f"cluster in {layout.state}: no node runs; start it with `up`")
    for target in running:
        load_into(target, path)
    return [target.name for target in running]


def load_pause(target: NodeLayout) -> None:
    """The image of the process that holds a pod's namespaces, made here out of one static program."""
    program = (target.cluster.bin / "pause").resolve()
    path = target.cluster.state / "pause.tar"
    if not path.exists():
        archive.write(path, PAUSE_IMAGE, {"pause": program}, ["/pause"], user="65535:65535")
    load_into(target, path)

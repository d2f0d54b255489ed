"""Bring image archives into every node's containerd, once each.

What was brought in is remembered, for two reasons: an archive that has not changed is not imported again, and a node that
joins later gets what the others have.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterable
from pathlib import Path

from hack.cluster import archive, processes
from hack.cluster.layout import Layout, NodeLayout, current_images
from hack.cluster.settings import PAUSE_IMAGE


def current() -> list[Path]:
    """The archives that the image builder made last."""
    found = sorted(path.resolve() for path in current_images().glob("*.tar") if path.exists())
    if not found:
        raise LookupError(f"images in {current_images()}: none; build them with `python -m hack.images build`")
    return found


def _stamp(path: Path) -> str:
    """Changes when the archive does."""
    status = path.stat()
    return f"{status.st_size}-{status.st_mtime_ns}-{status.st_ino}"


def _loaded(target: NodeLayout) -> dict[str, str]:
    """Stamp of each archive that the node has, by path."""
    try:
        loaded: dict[str, str] = json.loads(target.loaded.read_text())
    except FileNotFoundError:
        return {}
    return loaded


def load_into(target: NodeLayout, path: Path) -> None:
    """Import one archive (OCI or Docker) under the names that it carries, unless the node has it."""
    path = path.resolve()
    stamp = _stamp(path)
    loaded = _loaded(target)
    if loaded.get(str(path)) == stamp:
        return
    command = [str(target.cluster.bin / "ctr"), "--address", str(target.containerd_socket), "--namespace", "k8s.io"]
    answer = subprocess.run([*command, "images", "import", str(path)], capture_output=True, text=True, check=False)
    if answer.returncode:
        raise RuntimeError(f"{path}: not imported to {target.name}: {(answer.stderr or answer.stdout).strip()[-1000:]}")
    target.loaded.write_text(json.dumps(loaded | {str(path): stamp}, indent=1))


def load(layout: Layout, path: Path) -> None:
    """Import the archive to every node that runs."""
    running = [n for n in layout.nodes() if processes.pid_of(layout, n.process("containerd")) is not None]
    if not running:
        raise LookupError(f"cluster in {layout.state}: no node runs; start it with `up`")
    for target in running:
        load_into(target, path)


def loaded_elsewhere(target: NodeLayout) -> Iterable[Path]:
    """Archives that other nodes of the cluster have, and that are still there."""
    others = (_loaded(other) for other in target.cluster.nodes() if other != target)
    return sorted({Path(path) for loaded in others for path in loaded if Path(path).exists()})


def load_first(target: NodeLayout) -> None:
    """What a node needs before its kubelet starts: the image that keeps a pod's namespaces, and what the others have."""
    program = (target.cluster.bin / "pause").resolve()
    path = target.cluster.state / "pause.tar"
    if not path.exists():
        archive.write(path, PAUSE_IMAGE, {"pause": program}, ["/pause"], user="65535:65535")
    for each in (path, *loaded_elsewhere(target)):
        load_into(target, each)

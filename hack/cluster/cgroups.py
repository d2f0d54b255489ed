"""The control groups that pods live in: make them, end what is in them, remove them.

Works with cgroup v2 and with v1's one hierarchy a controller: a group is the same relative path under every hierarchy.
"""

from __future__ import annotations

import contextlib
import time
from pathlib import Path
from typing import Final

ROOT: Final = Path("/sys/fs/cgroup")
GROUP: Final = "tangram-cluster"
"""Parent of every node's pods, at the top of the hierarchy."""

REMOVE_TIMEOUT_S: Final = 10.0
"""A group can be removed once its last process is reaped. Guessed."""


def hierarchies(root: Path = ROOT) -> list[Path]:
    """Mount points that take groups: one with cgroup v2, one a controller with v1."""
    if (root / "cgroup.controllers").exists():
        return [root]
    return sorted(child for child in root.iterdir() if (child / "cgroup.procs").exists() and not child.is_symlink())


def make(path: str, root: Path = ROOT) -> None:
    """Make the group in every hierarchy, with every controller on in its parents where that is requested (v2)."""
    for hierarchy in hierarchies(root):
        group = hierarchy
        for part in path.split("/"):
            controllers = group / "cgroup.controllers"
            if controllers.exists():
                _turn_on(group, controllers.read_text().split())
            group = group / part
            group.mkdir(exist_ok=True)


def _turn_on(group: Path, controllers: list[str]) -> None:
    for controller in controllers:
        with contextlib.suppress(OSError):  # one that cannot be delegated here is left out, as the kubelet does
            (group / "cgroup.subtree_control").write_text(f"+{controller}")


def processes(path: str, root: Path = ROOT) -> set[int]:
    """Everything that runs in the group or below it."""
    found: set[int] = set()
    for hierarchy in hierarchies(root):
        for listing in (hierarchy / path).rglob("cgroup.procs"):
            with contextlib.suppress(OSError):
                found.update(int(line) for line in listing.read_text().split())
    return found


def remove(path: str, root: Path = ROOT) -> None:
    """Remove the group and all below it, in every hierarchy."""
    deadline = time.monotonic() + REMOVE_TIMEOUT_S
    for hierarchy in hierarchies(root):
        while (hierarchy / path).is_dir():
            groups = [entry for entry in (hierarchy / path).rglob("*") if entry.is_dir()]
            for group in [*sorted(groups, reverse=True), hierarchy / path]:
                with contextlib.suppress(OSError):
                    group.rmdir()
            if time.monotonic() > deadline:
                raise TimeoutError(f"{hierarchy / path}: still has processes after {REMOVE_TIMEOUT_S:g} s")
            if (hierarchy / path).is_dir():
                time.sleep(0.05)

"""Take the cluster down and leave the machine as it was found.

The order matters: nodes first and with them all pods, then the control plane from the outside in, then what the kernel
still has (addresses, rules, groups), then the files. Works from any state, half-started and half-stopped included.
"""

from __future__ import annotations

import contextlib
import shutil
from pathlib import Path

from hack.cluster import cgroups, control_plane, network, node, processes
from hack.cluster.console import Steps
from hack.cluster.layout import Layout


def take_down(layout: Layout, steps: Steps) -> None:
    if not layout.state.exists():
        steps.print(f"nothing to take down in {layout.state}")
        return
    with steps.step("stop the nodes and their pods"):
        for each in layout.nodes():
            node.stop(each)
    with steps.step("stop the control plane"):
        for name in reversed(control_plane.NAMES):
            processes.stop(layout, name, timeout_s=0 if name in {"apiserver", "etcd"} else 2)
    with steps.step("remove addresses, rules, control groups and files"):
        network.remove_address(1)
        network.remove_rules()
        for each in layout.nodes():
            cgroups.remove(f"{cgroups.GROUP}/{each.name}")
        cgroups.remove(cgroups.GROUP)
        _remove_mount_points(layout)
        shutil.rmtree(layout.state)


def _remove_mount_points(layout: Layout) -> None:
    """The folders that nodes' folders were mounted over, deepest first; one that was used since stays."""
    if not layout.made_folders.exists():
        return
    for line in reversed(layout.made_folders.read_text().splitlines()):
        with contextlib.suppress(OSError):
            Path(line).rmdir()

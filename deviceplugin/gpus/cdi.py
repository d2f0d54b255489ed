"""The CDI specification of this node's GPUs, made from the files of the driver root.

One device for each GPU and each MIG instance, named by UUID; what every container with a GPU needs besides (control devices, and the files that
`deviceplugin.gpus.driver_files` finds) once for all. Paths in it are the host's. Independent of pods, and of what NVIDIA's tools wrote (`cdi_source`).

Format: github.com/cncf-tags/container-device-interface, SPEC.md, version 0.5.0.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import msgspec

from deviceplugin.gpus import driver_files
from deviceplugin.gpus.driver_paths import DriverRoot
from deviceplugin.grants.atomic_file import make_folder, write_atomically
from vgpu.api.contract import CDI_KIND
from vgpu.api.inventory import Gpu, Inventory, MigInstance
from vgpu.health.presence import bus_address

VERSION: Final = "0.5.0"
SPEC_FILE: Final = "tangram.sh-gpu.json"
NO_ALIASES: Final[Mapping[str, str]] = MappingProxyType({})

_MIG_MINOR = re.compile(r"gpu([0-9]+)/gi([0-9]+)(?:/ci([0-9]+))?/access ([0-9]+)\Z")
_CAPS_MAJOR = re.compile(r"^\s*([0-9]+) nvidia-caps$", re.MULTILINE)


def spec(inventory: Inventory, root: DriverRoot, aliases: Mapping[str, str] = NO_ALIASES) -> dict[str, Any]:
    """The specification as decoded JSON. `aliases`: further names of MIG instances, name -> UUID."""
    devices = [_device(gpu.uuid, _gpu_nodes(gpu, root)) for gpu in inventory.gpus if not gpu.mig]
    minors = mig_minors(root.here)
    for gpu in inventory.gpus:
        for instance in gpu.instances:
            names = [instance.uuid, *(name for name, uuid in sorted(aliases.items()) if uuid == instance.uuid)]
            devices += [_device(name, _instance_nodes(gpu, instance, minors, root)) for name in names]
    nodes = [_node(name, root) for name in driver_files.control_nodes(root)]
    edits = {"deviceNodes": nodes, "mounts": list(_mounts(root))}
    return {"cdiVersion": VERSION, "kind": CDI_KIND, "devices": devices, "containerEdits": edits}


def write(folder: Path, document: Mapping[str, Any]) -> bool:
    """Write a specification where container runtimes read it. Returns whether it changed. Raises OSError."""
    content = msgspec.json.format(msgspec.json.encode(document), indent=2) + b"\n"
    path = folder / SPEC_FILE
    if path.exists() and path.read_bytes() == content:
        return False
    make_folder(folder)
    write_atomically(path, content, 0o644)
    return True


def mig_minors(root: Path) -> dict[tuple[int, int, int | None], int]:
    """(GPU minor, GPU instance, compute instance or None) -> minor of its capability device, as the driver lists them."""
    for where in (root / "proc", Path("/proc")):
        try:
            lines = (where / "driver/nvidia-caps/mig-minors").read_text().splitlines()
        except OSError:
            continue
        found = filter(None, map(_MIG_MINOR.match, lines))
        return {(int(m[1]), int(m[2]), int(m[3]) if m[3] else None): int(m[4]) for m in found}
    return {}


def capability_major(root: Path) -> int | None:
    """Major number of capability devices; None where no such driver is loaded."""
    for where in (root / "proc", Path("/proc")):
        with suppress(OSError):
            found = _CAPS_MAJOR.search((where / "devices").read_text())
            if found:
                return int(found[1])
    return None


def capability_minor(gpu: int, gpu_instance: int, compute_instance: int | None) -> int:
    """The numbers of the driver's list, for when it cannot be read: 135 numbers a GPU from 3 on, 9 a GPU instance.

    Read off /proc/driver/nvidia-caps/mig-minors of drivers R450 to R580.
    """
    of_gpu_instance = 3 + 135 * gpu + 9 * gpu_instance
    return of_gpu_instance if compute_instance is None else of_gpu_instance + 1 + compute_instance


def _instance_nodes(
    gpu: Gpu, instance: MigInstance, minors: dict[tuple[int, int, int | None], int], root: DriverRoot
) -> list[dict[str, Any]]:
    """With the numbers of its capability devices: those of a new instance may have no file on the host yet."""
    within, compute = instance.gpu_instance, instance.compute_instance
    caps = [
        minors.get((gpu.minor, within, part), capability_minor(gpu.minor, within, part)) for part in (None, compute)
    ]
    major = capability_major(root.here)
    numbers: list[dict[str, Any]] = [{} if major is None else {"type": "c", "major": major, "minor": m} for m in caps]
    nodes = [_node(f"nvidia-caps/nvidia-cap{minor}", root) | more for minor, more in zip(caps, numbers, strict=True)]
    return [*_gpu_nodes(gpu, root), *nodes]


def _device(uuid: str, nodes: list[dict[str, Any]]) -> dict[str, Any]:
    return {"name": uuid, "containerEdits": {"deviceNodes": nodes}}


def _gpu_nodes(gpu: Gpu, root: DriverRoot) -> list[dict[str, Any]]:
    rendering = driver_files.render_nodes(root, bus_address(gpu.pci))
    return [_node(name, root) for name in (f"nvidia{gpu.minor}", *rendering)]


def _node(name: str, root: DriverRoot) -> dict[str, Any]:
    return {"path": f"/dev/{name}", "hostPath": root.node_path(name), "permissions": "rw"}


def _mounts(root: DriverRoot) -> Iterator[dict[str, Any]]:
    for name, host in driver_files.libraries(root):
        for folder in driver_files.LOADER_FOLDERS:
            yield _mount(host, f"{folder}/{name}")
    for found in (driver_files.configuration, driver_files.programs, driver_files.storage_files):
        for at, host in found(root):
            yield _mount(host, at)
    for at, host in driver_files.sockets(root):
        yield _mount(host, at, "noexec")


def _mount(host: str, container: str, *more: str) -> dict[str, Any]:
    return {"hostPath": host, "containerPath": container, "options": ["ro", "nosuid", "nodev", *more, "bind"]}

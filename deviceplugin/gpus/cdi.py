"""The CDI specification of this node's GPUs, made from the files of the driver root.

One device for each GPU and each MIG instance, named by UUID; what every container with a GPU needs besides (control devices, the
driver's user-side libraries under the names that programs load, nvidia-smi, the persistence daemon's socket) once for all.
Paths in it are the host's. Independent of pods.

Format: github.com/cncf-tags/container-device-interface, SPEC.md, version 0.5.0.
"""

from __future__ import annotations

import platform
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import msgspec

from deviceplugin.grants.atomic_file import make_folder, resolve_inside, write_atomically
from nvml.library import LIBRARY_FOLDERS
from vgpu.api.contract import CDI_KIND
from vgpu.api.inventory import Gpu, Inventory, MigInstance

VERSION: Final = "0.5.0"
SPEC_FILE: Final = "tangram.sh-gpu.json"
NO_ALIASES: Final[Mapping[str, str]] = MappingProxyType({})

LIBRARIES: Final = (
    "libcuda", "libnvidia-ml", "libnvidia-ptxjitcompiler", "libnvidia-nvvm", "libnvidia-nvvm70", "libcudadebugger",
    "libnvidia-gpucomp", "libnvidia-opencl", "libnvcuvid", "libnvidia-encode", "libnvidia-opticalflow",
)  # fmt: skip
"""What compute and utility programs load, as NVIDIA's container toolkit lists it."""


def loader_folders(machine: str) -> tuple[str, str]:
    """Folders that glibc searches without a cache, on a machine as uname names it: Debian's and all others'."""
    return (f"/usr/lib/{machine}-linux-gnu", "/usr/lib64")


LOADER_FOLDERS: Final = loader_folders(platform.machine())
"""Containers have the node's architecture."""

CONTROL_NODES: Final = ("nvidiactl", "nvidia-uvm", "nvidia-uvm-tools")
CONTROL_NODES_NEEDED: Final = ("nvidiactl", "nvidia-uvm")
PROGRAMS: Final = ("nvidia-smi",)
PROGRAM_FOLDERS: Final = ("bin", "usr/bin")
PERSISTENCED: Final = "run/nvidia-persistenced/socket"

_SHARED_OBJECT = re.compile(r"(lib[\w-]+)\.so\.([0-9.]+)\Z")
_MIG_MINOR = re.compile(r"gpu([0-9]+)/gi([0-9]+)(?:/ci([0-9]+))?/access ([0-9]+)\Z")
_CAPS_MAJOR = re.compile(r"^\s*([0-9]+) nvidia-caps$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class DriverRoot:
    """A driver's files, as we see them and as the host does."""

    here: Path
    host: Path

    def on_host(self, path: Path) -> str:
        """The host's path of a file below `here`, links followed as on the host."""
        real = resolve_inside(self.here, path)
        return str(self.host / real.relative_to(self.here)) if real.is_relative_to(self.here) else str(real)

    def node(self, name: str) -> str:
        """The host's path of a device node: in the root's own /dev where it has one, else in the host's."""
        return str(self.host / "dev" / name) if (self.here / "dev" / "nvidiactl").exists() else f"/dev/{name}"

    def has_node(self, name: str) -> bool:
        """Is it in the root's /dev? True where the root has no /dev of its own: the host's cannot be seen from here."""
        return not (self.here / "dev" / "nvidiactl").exists() or (self.here / "dev" / name).exists()

    def first(self, folders: Iterable[str], name: str) -> Path | None:
        """The first of `folders` that has a file of this name: that file."""
        return next((path for folder in folders if (path := self.here / folder / name).exists()), None)


def spec(inventory: Inventory, root: DriverRoot, aliases: Mapping[str, str] = NO_ALIASES) -> dict[str, Any]:
    """The specification as decoded JSON. `aliases`: further names of MIG instances, name -> UUID."""
    devices = [_device(gpu.uuid, [_node(f"nvidia{gpu.minor}", root)]) for gpu in inventory.gpus if not gpu.mig]
    minors = mig_minors(root.here)
    for gpu in inventory.gpus:
        for instance in gpu.instances:
            names = [instance.uuid, *(name for name, uuid in sorted(aliases.items()) if uuid == instance.uuid)]
            devices += [_device(name, _instance_nodes(gpu, instance, minors, root)) for name in names]
    edits = {"deviceNodes": list(_control_nodes(root)), "mounts": list(_mounts(root))}
    return {"cdiVersion": VERSION, "kind": CDI_KIND, "devices": devices, "containerEdits": edits}


def write(folder: Path, inventory: Inventory, root: DriverRoot, aliases: Mapping[str, str] = NO_ALIASES) -> bool:
    """Write the specification where container runtimes read it. Returns whether it changed. Raises OSError."""
    content = msgspec.json.format(msgspec.json.encode(spec(inventory, root, aliases)), indent=2) + b"\n"
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
    return [_node(f"nvidia{gpu.minor}", root), *nodes]


def _device(uuid: str, nodes: list[dict[str, Any]]) -> dict[str, Any]:
    return {"name": uuid, "containerEdits": {"deviceNodes": nodes}}


def _control_nodes(root: DriverRoot) -> Iterator[dict[str, Any]]:
    own = (root.here / "dev" / "nvidiactl").exists()
    for name in CONTROL_NODES:
        if name in CONTROL_NODES_NEEDED or (own and root.has_node(name)):
            yield _node(name, root)


def _node(name: str, root: DriverRoot) -> dict[str, Any]:
    return {"path": f"/dev/{name}", "hostPath": root.node(name), "permissions": "rw"}


def _mounts(root: DriverRoot) -> Iterator[dict[str, Any]]:
    for name, host in _libraries(root):
        for folder in LOADER_FOLDERS:
            yield _mount(host, f"{folder}/{name}")
    for program in PROGRAMS:
        if found := root.first(PROGRAM_FOLDERS, program):
            yield _mount(root.on_host(found), f"/usr/bin/{program}")
    if (root.here / PERSISTENCED).exists():
        yield _mount(str(root.host / PERSISTENCED), f"/{PERSISTENCED}", "noexec")


def _libraries(root: DriverRoot) -> Iterator[tuple[str, str]]:
    """(name that programs load, host path of the file). Names are the links that the installer made (the SONAMEs)."""
    found = root.first(LIBRARY_FOLDERS, "libcuda.so.1")
    if found is None:
        return
    named: dict[str, set[str]] = {}
    for path in sorted(found.parent.iterdir()):
        match = _SHARED_OBJECT.match(path.name)
        if match and match[1] in LIBRARIES:
            named.setdefault(root.on_host(path), set()).add(path.name)
    for host, names in sorted(named.items()):
        short = [name for name in names if name.rpartition(".so.")[2].isdigit()]
        for name in sorted(short or names):
            yield name, host
            if name == "libcuda.so.1":
                yield "libcuda.so", host  # what programs that are linked without a SONAME request


def _mount(host: str, container: str, *more: str) -> dict[str, Any]:
    return {"hostPath": host, "containerPath": container, "options": ["ro", "nosuid", "nodev", *more, "bind"]}

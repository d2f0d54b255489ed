"""Which files of a driver's root a container gets, as far as this driver has them: libraries, configuration, programs, sockets, device nodes.

The list is that of NVIDIA's container toolkit (github.com/NVIDIA/nvidia-container-toolkit at d34b3046, pkg/nvcdi and internal/discover; read only), with these differences: no GSP
firmware, which the kernel loads; no programs that are daemons, and no MPS, whose clients cannot be suspended one by one; no X server modules; of DRM nodes only those
that render; of IMEX channels the first one, as a container that names none gets of NVIDIA's device plugin where it gives any. Without hooks nothing renews a
container's cache of libraries, so each library is mounted under the names that programs load, in both folders that glibc searches without a cache.
"""

from __future__ import annotations

import platform
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from deviceplugin.gpus.driver_paths import DriverRoot
from nvml.driver_root import version_in

LIBRARIES: Final = (
    "libcuda", "libnvidia-ml", "libnvidia-ptxjitcompiler", "libnvidia-nvvm", "libnvidia-nvvm70", "libcudadebugger",
    "libnvidia-gpucomp", "libnvidia-opencl", "libnvcuvid", "libnvidia-encode", "libnvidia-opticalflow",
)  # fmt: skip
"""What compute and utility programs load. Those that are there count whatever their version is."""

OWN_VERSION: Final = (
    "libnvidia-egl-gbm",
    "libnvidia-egl-wayland",
    "libnvidia-egl-wayland2",
    "libnvidia-egl-xcb",
    "libnvidia-egl-xlib",
)
"""Libraries of the driver with a version that is not the driver's."""

LINKS: Final = (
    ("libcuda.so", "libcuda.so.1"),
    ("libnvidia-ml.so", "libnvidia-ml.so.1"),
    ("libnvidia-opticalflow.so", "libnvidia-opticalflow.so.1"),
    ("libGLX_indirect.so.0", "libGLX_nvidia.so.0"),
)
"""Further names: what programs that are linked without a SONAME request, and what GLVND does for a server without a vendor."""


def loader_folders(machine: str) -> tuple[str, str]:
    """Folders that glibc searches without a cache, on a machine as uname names it: Debian's and all others'."""
    return (f"/usr/lib/{machine}-linux-gnu", "/usr/lib64")


LOADER_FOLDERS: Final = loader_folders(platform.machine())
"""Containers have the node's architecture."""

SHARED: Final = (
    "glvnd/egl_vendor.d/10_nvidia.json", "egl/egl_external_platform.d/15_nvidia_gbm.json", "egl/egl_external_platform.d/10_nvidia_wayland.json",
    "egl/egl_external_platform.d/09_nvidia_wayland2.json", "egl/egl_external_platform.d/20_nvidia_xcb.json",
    "egl/egl_external_platform.d/20_nvidia_xlib.json", "nvidia/nvoptix.bin",
)  # fmt: skip
"""Files of /usr/share: EGL, and what OptiX needs."""
SETTINGS: Final = ("OpenCL/vendors/nvidia.icd",)
"""Files of /etc."""
VULKAN: Final = (
    "vulkan/icd.d/nvidia_icd.json", "vulkan/icd.d/nvidia_icd.x86_64.json", "vulkan/icd.d/nvidia_icd.aarch64.json", "vulkan/icd.d/nvidia_layers.json", "vulkan/implicit_layer.d/nvidia_layers.json",
)  # fmt: skip
"""Files that are in /etc, in /usr/share or, on GKE, in the root itself; in a container in /etc."""
SHARE_FOLDERS: Final = ("usr/share", "usr/local/share", "etc")

PROGRAMS: Final = ("nvidia-smi", "nvidia-debugdump")
SOCKETS: Final = ("run/nvidia-persistenced/socket", "run/nvidia-fabricmanager/socket")

CONTROL_NODES: Final = ("nvidiactl", "nvidia-uvm", "nvidia-uvm-tools", "nvidia-modeset")
CONTROL_NODES_NEEDED: Final = ("nvidiactl", "nvidia-uvm")
IMEX_NODES: Final = ("nvidia-caps-imex-channels/channel0",)
_STORAGE_NODE: Final = re.compile(r"nvidia-fs[0-9]{1,3}\Z")
STORAGE_FILES: Final = (("run/udev", "/run/udev"), ("etc/cufile.json", "/etc/cufile.json"))
"""With nodes of GPUDirect Storage."""
PCI_DEVICES: Final = Path("/sys/bus/pci/devices")
_DRM: Final = re.compile(r"(?:card|renderD)[0-9]{1,4}\Z")
MOST_STORAGE_NODES: Final = 16
"""Guessed: the module makes as many."""

_SHARED_OBJECT: Final = re.compile(r"(lib(?:cuda|nv)[\w-]*|lib[\w-]*nvidia[\w-]*)\.so\.([0-9.]+)\Z")
"""Names that libraries of the driver have: a folder of the host has thousands of others."""


def libraries(root: DriverRoot) -> Iterator[tuple[str, str]]:
    """(name that programs load, host path of the file). Names are the links that the installer made (the SONAMEs)."""
    found: dict[str, str] = {}
    folders = [folder for folder in root.library_folders() if folder.is_dir()]
    for folder in (*folders, *(folder / "vdpau" for folder in folders)):
        for name, host in _in_folder(root, folder):
            found.setdefault(name, host)
    for name, of in LINKS:
        if of in found:
            found.setdefault(name, found[of])
    yield from sorted(found.items())


def _in_folder(root: DriverRoot, folder: Path) -> Iterator[tuple[str, str]]:
    named: dict[str, set[str]] = {}
    try:
        paths = sorted(folder.iterdir())
    except OSError:
        return
    for path in paths:
        match = _SHARED_OBJECT.match(path.name)
        if match:
            host = root.on_host(path)
            if _is_drivers(match[1], host.rpartition("/")[2], root.version):
                named.setdefault(host, set()).add(path.name)
    for host, names in named.items():
        short = [name for name in names if name.rpartition(".so.")[2].isdigit()]
        yield from ((name, host) for name in short or names)


def _is_drivers(stem: str, file: str, version: str) -> bool:
    return stem in LIBRARIES or stem in OWN_VERSION or bool(version and version_in(file) == version)


def configuration(root: DriverRoot) -> Iterator[tuple[str, str]]:
    """(path in a container, host path)."""
    for names, folders, at in (
        (SHARED, SHARE_FOLDERS, "/usr/share"),
        (SETTINGS, ("etc", "usr/share"), "/etc"),
        (VULKAN, ("etc", "usr/share", "usr/local/share", "."), "/etc"),
    ):
        for name in names:
            if path := root.first(folders, name):
                yield f"{at}/{name}", root.on_host(path)


def programs(root: DriverRoot) -> Iterator[tuple[str, str]]:
    """(path in a container, host path)."""
    for name in PROGRAMS:
        if path := root.first(root.program_folders, name):
            yield f"/usr/bin/{name}", root.on_host(path)


def sockets(root: DriverRoot) -> Iterator[tuple[str, str]]:
    """(path in a container, host path)."""
    for name in SOCKETS:
        if (root.here / name).exists():
            yield f"/{name}", str(root.host / name)


def control_nodes(root: DriverRoot) -> Iterator[str]:
    """Names below /dev. Those that are needed, whether they can be seen or not, and of the others those that are seen."""
    for name in (*CONTROL_NODES, *IMEX_NODES):
        if name in CONTROL_NODES_NEEDED or root.sees_node(name):
            yield name
    yield from storage_nodes(root)


def storage_nodes(root: DriverRoot) -> list[str]:
    """Of GPUDirect Storage."""
    folder = root.seen_dev()
    try:
        names = [path.name for path in folder.iterdir()] if folder else []
    except OSError:
        return []
    return sorted(name for name in names if _STORAGE_NODE.match(name))[:MOST_STORAGE_NODES]


def storage_files(root: DriverRoot) -> Iterator[tuple[str, str]]:
    """(path in a container, host path): where there is a node of GPUDirect Storage."""
    if storage_nodes(root):
        for name, at in STORAGE_FILES:
            if (root.here / name).exists():
                yield at, root.on_host(root.here / name)


def drm_nodes(pci: str, devices: Path = PCI_DEVICES) -> list[str]:
    """Names below /dev of a GPU's DRM nodes, as the kernel has them at this PCI address."""
    try:
        names = [path.name for path in (devices / pci / "drm").iterdir()] if pci else []
    except OSError:
        return []
    return sorted(f"dri/{name}" for name in names if _DRM.match(name))


def render_nodes(root: DriverRoot, pci: str, devices: Path = PCI_DEVICES) -> list[str]:
    """Those that render, where they are seen."""
    return [name for name in drm_nodes(pci, devices) if name.startswith("dri/renderD") and root.sees_node(name)]

"""Where platforms have the files of NVIDIA's driver, and which of several places is taken. Pure: who looked hands in what was found.

A place is a root, which programs of the driver see as `/`, and the folder of its libraries. Roots are below the root that the operator named: the node's `/`
unless `driver.root` of the chart says otherwise, and then only what is below that is looked at.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

LIBRARY_FOLDERS: Final = (
    "lib", "lib64", "usr/lib/x86_64-linux-gnu", "usr/lib/aarch64-linux-gnu", "usr/lib64", "usr/lib",
)  # fmt: skip
"""Where driver installers put the libraries, relative to a driver root: NVIDIA's container, Debian, Red Hat."""

PROGRAM_FOLDERS: Final = ("bin", "usr/bin")
OPERATOR_ROOT: Final = "run/nvidia/driver"


@dataclass(frozen=True, slots=True)
class Place:
    """A row of docs/operations/cdi.md. Paths are relative: `root` to the node's `/`, the folders to `root`."""

    platform: str
    root: str
    libraries: tuple[str, ...]
    programs: tuple[str, ...]
    source: str
    """Where that was read, or that it was tested."""


PLACES: Final = (
    Place("host", "", LIBRARY_FOLDERS, PROGRAM_FOLDERS, "tested"),
    Place(
        "Bottlerocket", "", ("usr/lib/nvidia/tesla",), ("usr/libexec/nvidia/tesla/bin",),
        "read only: bottlerocket-os/bottlerocket-kernel-kit, packages/kmod-6.1-nvidia/kmod-6.1-nvidia.spec",
    ),
    Place(
        "Talos", "", ("usr/local/lib",), ("usr/local/bin",),
        "read only: siderolabs/extensions, nvidia-gpu/nvidia-container-toolkit/nvidia-pkgs/production/pkg.yaml",
    ),
    Place(
        "GKE", "home/kubernetes/bin/nvidia", ("lib64", "lib"), ("bin",),
        "read only: GoogleCloudPlatform/container-engine-accelerators, cmd/nvidia_gpu/nvidia_gpu.go",
    ),
    Place(
        "GPU Operator", OPERATOR_ROOT, LIBRARY_FOLDERS, PROGRAM_FOLDERS,
        "read only: NVIDIA/gpu-operator, assets/state-driver/0500_daemonset.yaml and cmd/nvidia-validator/driver.go",
    ),
)  # fmt: skip
"""In the order in which they are taken where nothing else decides: as in GPU Operator's own validation, a driver of the host comes before its container's.
k3s and RKE2 have no place of their own: they run on a host that has one of these."""


@dataclass(frozen=True, slots=True)
class Found:
    """A place with a management library. `version`: of its file name, as `580.65.06`; empty where it has none."""

    place: Place
    version: str


def choose(found: Sequence[Found], loaded: str) -> tuple[int, str]:
    """Which of these (at least one), and why, as a clause. `loaded`: version of the kernel module; empty where it is not known.

    Libraries of another version than the module's cannot be used, so a place with the module's version comes before the others.
    """
    matching = [at for at, one in enumerate(found) if loaded and one.version == loaded]
    at = matching[0] if matching else 0
    others = ", ".join(
        f"{one.place.platform} has {one.version or 'an unknown version'}"
        for other, one in enumerate(found)
        if other != at
    )
    if not others:
        return at, "it is the only place with a driver"
    if matching:
        return at, f"its version is that of the loaded kernel module, {loaded}; {others}"
    return at, f"it comes first where no version decides (kernel module: {loaded or 'not known'}); {others}"


def page() -> str:
    """The table of docs/operations/cdi.md."""
    rows = [
        f"| {one.platform} | `/{one.root}` | {', '.join(f'`{folder}`' for folder in one.libraries)} | {one.source} |"
        for one in PLACES
    ]
    return "\n".join(("| platform | driver root | libraries, below it | known from |", "|---|---|---|---|", *rows))

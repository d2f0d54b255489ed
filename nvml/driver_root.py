"""Find the driver's files on this machine: looks at the places that `vgpu.api.driver_places` lists, and has it choose.

Looked up anew each time: a driver container mounts its root later than this program starts, and another one at its upgrade.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from vgpu.api.driver_places import OPERATOR_ROOT, PLACES, Found, Place, choose

LIBRARY: Final = "libnvidia-ml.so.1"
VERSION: Final = Path("/proc/driver/nvidia/version")
MOST_LINKS: Final = 40
"""That a path may have. Specified by the kernel (MAXSYMLINKS)."""
_VERSIONED: Final = re.compile(r"lib[\w-]+\.so\.([0-9]+(?:\.[0-9]+)+)\Z")
_MODULE: Final = re.compile(r"Kernel Module(?: for \S+)?\s+([0-9]+(?:\.[0-9]+)+)")


@dataclass(frozen=True, slots=True)
class DriverPlace:
    """Where a driver is."""

    place: Place
    root: Path
    """As it is seen from here."""
    libraries: Path
    """Folder, likewise."""
    library: Path
    """The management library, links followed as on the node."""
    version: str
    """Of that library, by its name; empty where that has none."""
    why: str
    """Why this place and no other."""

    @property
    def text(self) -> str:
        """For the log and the inventory: platform and reason."""
        return f"{self.place.platform}: {self.why}"


def locate(
    driver_root: Path, operator_root: Path = Path("/") / OPERATOR_ROOT, loaded: str | None = None
) -> DriverPlace | None:
    """The driver below `driver_root`; None where there is none. `loaded`: version of the kernel module, read where it is None.

    `operator_root`: where this container has GPU Operator's root as a mount of its own, which shows a mount that is made later. It counts only where
    `driver_root` is a node's root that has that folder.
    """
    places: list[tuple[Found, DriverPlace]] = []
    for place in PLACES:
        root = driver_root / place.root if place.root else driver_root
        if place.root == OPERATOR_ROOT and root.parent.is_dir() and operator_root.is_dir():
            root = operator_root
        for folder in place.libraries:
            library = _library(root, root / folder / LIBRARY)
            if library is not None:
                version = version_in(library.name)
                made = DriverPlace(place, root, root / folder, library, version, "")
                places.append((Found(place, version), made))
                break
    if not places:
        return None
    chosen, why = choose([found for found, _ in places], loaded_version() if loaded is None else loaded)
    one = places[chosen][1]
    return DriverPlace(one.place, one.root, one.libraries, one.library, one.version, why)


def _library(root: Path, path: Path) -> Path | None:
    """Links of the machine that the root came from are followed, and where that leads nowhere, links of this one."""
    there = inside(root, path)
    if there.is_file():
        return there
    return path.resolve() if path.is_file() else None


def version_in(name: str) -> str:
    """The driver's version in the name of a library's file, as `libcuda.so.580.65.06`; empty where it has none, as `libcuda.so.1`."""
    found = _VERSIONED.match(name)
    return found[1] if found else ""


def loaded_version(path: Path = VERSION) -> str:
    """Of the kernel module, by what the driver writes; empty where none is loaded."""
    try:
        with path.open("rb") as file:
            text = file.read(4096).decode(errors="replace")
    except OSError:
        return ""
    found = _MODULE.search(text)
    return found[1] if found else ""


def inside(root: Path, path: Path) -> Path:
    """`path` (below `root`) with each link in it followed as if `root` were `/`, as on the machine that the root came from: the result is below `root`.

    What does not exist, and what is behind too many links, stays as it is written.
    """
    left, now, links = list(reversed(path.relative_to(root).parts)), root, 0
    while left:
        part = left.pop()
        if part == "..":
            now = now.parent if now != root else root
            continue
        step = now / part
        target = _target(step)
        if target is None:
            now = step
            continue
        links += 1
        if links > MOST_LINKS:
            return path
        if target.is_absolute():
            now = root
        left += [one for one in reversed(target.parts) if one != "/"]
    return now


def _target(path: Path) -> Path | None:
    try:
        return path.readlink()
    except OSError:
        return None  # no link, or not there

"""The paths of a driver's root: as this container sees them, and as the host does."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from nvml.driver_root import DriverPlace, inside, locate
from vgpu.api.driver_places import LIBRARY_FOLDERS, PROGRAM_FOLDERS

NODE_ROOT: Final = Path("/")


@dataclass(frozen=True, slots=True)
class DriverRoot:
    """A driver's files, as we see them and as the host does."""

    here: Path
    host: Path
    place: DriverPlace | None = None
    """What was found there; None: nothing was, or nobody looked."""
    node: Path | None = None
    """The node's / as seen from here; None: it cannot be seen."""

    @classmethod
    def below(cls, here: Path, host: Path) -> DriverRoot:
        """The root of the driver that is below a folder, which the host has as `host`; the folder itself where there is none."""
        node = here if host == NODE_ROOT else None
        place = locate(here)
        if place is None:
            return cls(here, host, None, node)
        return cls(place.root, host / place.place.root, place, node)

    @property
    def version(self) -> str:
        """Of the driver, by the name of its library; empty where that is not known."""
        return self.place.version if self.place else ""

    @property
    def program_folders(self) -> tuple[str, ...]:
        """Relative to `here`."""
        return self.place.place.programs if self.place else PROGRAM_FOLDERS

    def library_folders(self) -> list[Path]:
        """Where the driver's libraries are, as seen from here: one, or none."""
        if self.place:
            return [self.place.libraries]
        found = self.first(LIBRARY_FOLDERS, "libcuda.so.1")
        return [found.parent] if found else []

    def on_host(self, path: Path) -> str:
        """The host's path of a file below `here`, links followed as on the host."""
        real = inside(self.here, path)
        if real.exists() or not path.exists():
            return str(self.host / real.relative_to(self.here))
        return str(path.resolve())

    def node_path(self, name: str) -> str:
        """The host's path of a device node: in the root's own /dev where it has one, else in the host's."""
        return str(self.host / "dev" / name) if self._has_dev() else f"/dev/{name}"

    def seen_dev(self) -> Path | None:
        """The /dev of `node_path`, as seen from here; None where it cannot be seen."""
        if self._has_dev():
            return self.here / "dev"
        return self.node / "dev" if self.node and (self.node / "dev/nvidiactl").exists() else None

    def sees_node(self, name: str) -> bool:
        """Is it there? False where that cannot be seen."""
        dev = self.seen_dev()
        return dev is not None and (dev / name).exists()

    def first(self, folders: Iterable[str], name: str) -> Path | None:
        """The first of `folders` that has a file of this name: that file."""
        return next(
            (
                path
                for folder in folders
                if (path := self.here / folder / name).exists() or inside(self.here, path).exists()
            ),
            None,
        )

    def there(self, host: str) -> bool | None:
        """Is there anything at a path of the host? None where that cannot be seen from here."""
        path = Path(host)
        for root, seen in ((self.host, self.here), (NODE_ROOT, self.node)):
            if seen is not None and path.is_relative_to(root):
                return inside(seen, seen / path.relative_to(root)).exists()
        return None

    def _has_dev(self) -> bool:
        return (self.here / "dev" / "nvidiactl").exists()

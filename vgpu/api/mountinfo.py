"""What the text of /proc/<pid>/mountinfo shows: the mounts, and whether a container has its grant where it should be. Pure.

The runtime resolves the path of each mount in the container's root, so a symbolic link in the image has the grant elsewhere, where a volume may
cover it, and one in a volume has another volume over the grant. Admission cannot see that; the mounts show it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, NamedTuple

from vgpu.api.contract import GRANT_DIRS

REMOVED: Final = "//deleted"
"""Behind the name of a directory that was removed and is mounted still. Specified by the kernel (fs/d_path.c)."""
FOLDER: Final = "grants"


class MountInfo(NamedTuple):
    """One line (proc_pid_mountinfo(5)). Escapes of the kernel stay as they are: they are the same on both sides of a comparison."""

    device: str
    """Number of the file system."""
    root: str
    """Path in it of what is mounted, as the kernel writes it."""
    at: str
    """Where it is mounted, seen from the process's root."""

    @property
    def directory(self) -> str:
        """`root`, also of a directory that was removed since."""
        return self.root.removesuffix(REMOVED)


def mounts_in(mountinfo: str) -> Iterator[MountInfo]:
    """In the order in which they were made. Lines that are too short are left out."""
    for line in mountinfo.splitlines():
        fields = line.split(" ")
        if len(fields) > 4:
            yield MountInfo(fields[2], fields[3], fields[4])


def misplaced(mountinfo: str, key: str) -> str | None:
    """Why grant `key` cannot be found in this mount namespace, as a clause; empty where it is found, None where it is not mounted at all.

    The runtime mounts below the new root before it changes to it: that counts as not mounted yet.
    """
    mounts = list(mounts_in(mountinfo))
    places = [(one.at, number) for number, one in enumerate(mounts) if one.directory.endswith(f"/{FOLDER}/{key}")]
    settled = [(at, number) for at, number in places if at in GRANT_DIRS or not at.endswith(GRANT_DIRS)]
    found = [(at, number) for at, number in settled if at in GRANT_DIRS]
    for at, number in found:
        if not any(_covers(other.at, at) for other in mounts[number + 1 :]):
            return ""
    if found:
        return f"its grant at {found[0][0]} is covered by another mount"
    return f"its grant is mounted at {settled[0][0]} instead of {GRANT_DIRS[0]}" if settled else None


def _covers(other: str, at: str) -> bool:
    return at == other or at.startswith(f"{other}/")

"""Decide by the text of /proc/<pid>/mountinfo whether a container has its grant where it should be.

Pure. The runtime resolves the path of each mount in the container's root, so a symbolic link in the image has the grant elsewhere, where a volume may
cover it, and one in a volume has another volume over the grant. Admission cannot see that; the mounts show it.
"""

from __future__ import annotations

from typing import Final

from vgpu.contract import GRANT_DIRS

REMOVED: Final = "//deleted"
"""Behind the name of a directory that was removed and is mounted still. Specified by the kernel (fs/d_path.c)."""
FOLDER: Final = "grants"


def misplaced(mountinfo: str, key: str) -> str | None:
    """Why grant `key` cannot be found in this mount namespace, as a clause; empty where it is found, None where it is not mounted at all.

    The runtime mounts below the new root before it changes to it: that counts as not mounted yet.
    """
    mounts = [(fields[3], fields[4]) for line in mountinfo.splitlines() if len(fields := line.split(" ")) > 4]
    places = [(at, number) for number, (root, at) in enumerate(mounts) if _is_of(root, key)]
    settled = [(at, number) for at, number in places if at in GRANT_DIRS or not at.endswith(GRANT_DIRS)]
    found = [(at, number) for at, number in settled if at in GRANT_DIRS]
    for at, number in found:
        if not any(_covers(other, at) for _, other in mounts[number + 1 :]):
            return ""
    if found:
        return f"its grant at {found[0][0]} is covered by another mount"
    return f"its grant is mounted at {settled[0][0]} instead of {GRANT_DIRS[0]}" if settled else None


def _is_of(root: str, key: str) -> bool:
    return root.removesuffix(REMOVED).endswith(f"/{FOLDER}/{key}")


def _covers(other: str, at: str) -> bool:
    return at == other or at.startswith(f"{other}/")

"""Decide at which paths a pod with a GPU share may not mount anything.

Pure, about the path alone: what a volume contains does not matter. A pod that mounts over the grant, or owns the directory in which the runtime makes
a mount point of ours, unloads the library: another container that has the same volume removes the mount point, and the kernel detaches the mount.

The runtime resolves a path in the container's own root, so a symbolic link of the image, or of another volume, may turn any path into any other.
Admission cannot see that; `vgpu.api.mountinfo` does afterwards. Links that most images or every /proc have are known here (`/var/run`,
`/proc/self/root`), and `..` is refused, because behind a link it does not lead where it seems to.

deploy/helm/tangram/templates/_expressions.tpl has `PATTERN` for the admission policy; tests/contract/chart/test_chart_mounts.py compares
them, and gives both the same paths.
"""

from __future__ import annotations

import re
from typing import Final

from vgpu.api.contract import CONTAINER_DIR, EARLIER_CONTAINER_DIR, PRELOAD_FILE

PRELOAD_DIR: Final = PRELOAD_FILE.rpartition("/")[0]

_RULES: Final = (
    (
        r"(?:.*/)?\.\.(?:/.*)?",
        "a path with .. may lead anywhere where the image has symbolic links: write the path without ..",
    ),
    (
        "/",
        f"the root directory contains {CONTAINER_DIR}, where the grant is mounted: mount the volume at a directory of its own",
    ),
    (
        re.escape(PRELOAD_DIR),
        f"the directory {PRELOAD_DIR} contains {PRELOAD_FILE}, which loads Tangram's library: mount at a directory below {PRELOAD_DIR}, or single files by subPath",
    ),
    (
        f"{re.escape(PRELOAD_FILE)}(?:/.*)?",
        f"{PRELOAD_FILE} loads Tangram's library: choose another path",
    ),
    (
        f"{re.escape(CONTAINER_DIR)}(?:/.*)?",
        f"the grant is mounted at {CONTAINER_DIR}: choose another path",
    ),
    (
        f"(?:/var)?{re.escape(EARLIER_CONTAINER_DIR)}(?:/.*)?",
        f"the grant of containers of an earlier release is mounted at {EARLIER_CONTAINER_DIR}: choose another path",
    ),
    (
        "/proc/[^/]+/.*",
        "links below /proc lead to other directories, /proc/self/root to the root directory: mount outside of /proc",
    ),
)  # fmt: skip
"""Cleaned paths, and why not with what to do instead. The first that matches counts."""

PATTERN: Final = f"^(?s:{'|'.join(pattern for pattern, _ in _RULES)})$"
"""All of them, as RE2 and Python read it."""


def cleaned(path: str) -> str:
    """As the kernel reads the path, links and `..` left as they are; a relative one begins at the root, as the kubelet has it."""
    return "/" + "/".join(part for part in path.split("/") if part not in ("", "."))


def refusal(path: str) -> str | None:
    """Why nothing may be mounted at a path of a pod with a share, and what to do instead; None where it may."""
    clean = cleaned(path)
    return next((why for pattern, why in _RULES if re.fullmatch(pattern, clean, re.DOTALL)), None)

"""The commit that an image is built from, as `tangram_build_info` reports it."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Final

from hack.images.catalogue import Image

UNKNOWN: Final = "unknown"
"""As the Dockerfile has it: built from a tree without git."""
CHANGED: Final = "-dirty"
"""Appended where tracked files differ from the commit, as `git describe --dirty` does."""


def commit_argument(image: Image) -> str:
    """`--build-arg=COMMIT=...` for the image's tree. An archive keeps the commit that its sources were first built from."""
    return f"--build-arg=COMMIT={image.commit or commit_of(image.root)}"


def commit_of(root: Path) -> str:
    """40 hex digits, `-dirty` behind them where tracked files were changed; `unknown` without git."""
    try:
        commit = _git(root, "rev-parse", "HEAD")
        changed = _git(root, "status", "--porcelain", "--untracked-files=no")
    except (OSError, subprocess.CalledProcessError):
        return UNKNOWN
    return commit + (CHANGED if changed else "")


def _git(root: Path, *arguments: str) -> str:
    # images are built as root, and git reads another user's repository only if it is named safe
    command = ["git", "-C", str(root), "-c", f"safe.directory={root}", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

"""The release before this one, from the archive of its sources: an upgrade begins with its image and its chart, and versions are mixed with it."""

from __future__ import annotations

import fcntl
import hashlib
import shutil
import tarfile
import tomllib
from pathlib import Path
from typing import Final

FOLDER: Final = Path(__file__).resolve().parents[1] / "tests/previous"
SOURCES: Final = FOLDER / "sources.tar.xz"


def commit() -> str:
    """40 hex digits."""
    return (FOLDER / "commit").read_text().strip()


def sources(under: Path) -> Path:
    """Folder with its source tree, in `under`. Several processes may request it at a time: one unpacks."""
    place = under / hashlib.sha256(SOURCES.read_bytes()).hexdigest()[:16]
    under.mkdir(parents=True, exist_ok=True)
    with (under / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not place.exists():
            fresh = place.with_suffix(".new")
            shutil.rmtree(fresh, ignore_errors=True)
            with tarfile.open(SOURCES) as archive:
                archive.extractall(fresh, filter="data")
            fresh.rename(place)
    return place


def version(tree: Path) -> str:
    """Of the release whose sources these are."""
    return str(tomllib.loads((tree / "pyproject.toml").read_text())["project"]["version"])


def metrics_page(tree: Path) -> Path:
    """The reference of its metrics."""
    return tree / "docs/reference/metrics.md"

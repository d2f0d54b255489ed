"""Library, arbiter and device plugin of the release before this one: see tests/previous/README.md."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tarfile
from functools import cache
from pathlib import Path

from tests.built import BUILD, REPOSITORY

SOURCES = REPOSITORY / "tests/previous/sources.tar.xz"


@cache
def previous_sources() -> Path:
    """Folder with the sources, from which its Python programs run. Several test processes may request it at a time: one unpacks."""
    place = BUILD / "previous" / hashlib.sha256(SOURCES.read_bytes()).hexdigest()[:16]
    place.parent.mkdir(parents=True, exist_ok=True)
    with (place.parent / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not place.exists():
            fresh = place.with_suffix(".new")
            shutil.rmtree(fresh, ignore_errors=True)
            with tarfile.open(SOURCES) as archive:
                archive.extractall(fresh, filter="data")
            fresh.rename(place)
    return place


@cache
def previous_library() -> Path:
    """Its libtangram.so, built from them."""
    place = previous_sources()
    with (place.parent / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        words = [
            "make",
            "--no-print-directory",
            "-s",
            "-j2",
            "-C",
            str(place / "shim"),
            f"BUILD={place / 'build'}",
            "lib",
        ]
        built = subprocess.run(words, env=os.environ | {"MAKEFLAGS": ""}, capture_output=True, text=True, check=False)
    assert built.returncode == 0, f"{' '.join(words)} failed:\n{built.stdout}{built.stderr}"
    return place / "build/libtangram.so"


def previous_python(code: str, given: str = "") -> str:
    """What a Python program prints that imports the previous release's packages; `given` is its standard input."""
    ended = subprocess.run(
        [sys.executable, "-c", code], cwd=previous_sources(), input=given, capture_output=True, text=True, timeout=60
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout

"""Library, arbiter and device plugin of the release before this one, as they run: see tests/previous/README.md."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from functools import cache
from pathlib import Path

from hack import previous
from tests.built import BUILD


@cache
def previous_sources() -> Path:
    """Folder with the sources, from which its Python programs run."""
    return previous.sources(BUILD / "previous")


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

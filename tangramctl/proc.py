"""Processes by /proc: is one still the one it was, and which carry a grant."""

from __future__ import annotations

import os
import sys
from collections.abc import Collection
from pathlib import Path

from vgpu.api.process_stat import process_stat

GRANT_VARIABLE = "TANGRAM_GRANT"


def called_by_kubectl() -> bool:
    """Was this program started as `kubectl tangram`?"""
    return Path(sys.argv[0]).name == "kubectl-tangram"


def start_ticks(pid: int) -> int | None:
    """When the process started, in clock ticks since boot: with the pid it names one process for good. None when it has ended."""
    try:
        stat = process_stat(Path(f"/proc/{pid}/stat").read_bytes())
        if stat is None or (stat.ended and len(list(Path(f"/proc/{pid}/task").iterdir())) < 2):
            return None
    except OSError:
        return None
    return stat.started


def boot_id() -> str:
    """Changes with each boot of the machine."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def grant_of(pid: int) -> str | None:
    """The grant that a process was started with; None when it has none, is gone, or is another user's."""
    try:
        environment = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return None
    prefix = f"{GRANT_VARIABLE}=".encode()
    values = [word[len(prefix) :] for word in environment.split(b"\0") if word.startswith(prefix)]
    return os.fsdecode(values[0]) if values else None


def carried(grants: Collection[str]) -> set[str]:
    """Those of the grants that some process was started with. Reads the environment of every process of this user."""
    if not grants:
        return set()
    pids = [int(folder.name) for folder in Path("/proc").iterdir() if folder.name.isdigit()]
    return {grant for pid in pids if (grant := grant_of(pid)) is not None and grant in grants}

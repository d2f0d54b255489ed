"""The caller: root, or a user by way of sudo, who then owns the built files.

What needs root runs as root; downloads and compilers do not, and a cache with root's files in a person's home would fail that person's
next build.
"""

from __future__ import annotations

import os
import pwd
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def become_root(module: str) -> None:
    """Run `python -m MODULE` again as root with the same arguments and environment, unless this is root."""
    if os.geteuid() == 0:
        return
    kept = [f"{name}={os.environ[name]}" for name in ("HOME", "PATH") if name in os.environ]  # sudo sets its own
    kept.append("PYTHONDONTWRITEBYTECODE=1")  # or root's files lie in the person's tree
    command = ["sudo", "-E", "env", *kept, sys.executable, "-m", module, *sys.argv[1:]]
    os.execvp("sudo", command)


def person(environment: Mapping[str, str] = os.environ) -> int | None:
    """User ID of the person who called through sudo; None without sudo."""
    named = environment.get("SUDO_UID", "")
    return int(named) if os.geteuid() == 0 and named.isdigit() and named != "0" else None


def as_person() -> dict[str, Any]:
    """Arguments for subprocess.run that make a program the person's own."""
    uid = person()
    if uid is None:
        return {}
    gid = pwd.getpwuid(uid).pw_gid
    return {"user": uid, "group": gid, "extra_groups": [gid]}


def make_folder(path: Path) -> None:
    """The folder and its parents, each that was missing the person's own."""
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    path.mkdir(parents=True, exist_ok=True)
    for folder in missing:
        own_by_person(folder)


def own_by_person(path: Path) -> None:
    """The file or folder belongs to the person from now on; nothing changes without sudo."""
    uid = person()
    if uid is not None:
        os.chown(path, uid, pwd.getpwuid(uid).pw_gid)

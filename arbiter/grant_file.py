"""Reads the files of one grant directory. Only the node writes them, but the arbiter does not trust their content."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Final
from uuid import UUID

from vgpu.api.burst import BurstLimits, burst_from_text, contradiction
from vgpu.api.cgroup import is_container_id
from vgpu.api.codec import GRANT_BYTES_LIMIT, grant_from_text
from vgpu.api.errors import BadDocument
from vgpu.api.grant import Grant

CONTAINER_BYTES_LIMIT: Final = 256
"""An ID has 64 characters."""


def read_grant(path: Path) -> Grant:
    """Raises OSError, UnicodeDecodeError, BadDocument; never blocks on a file that is not a plain file."""
    return grant_from_text(_text_of(path, GRANT_BYTES_LIMIT))


def read_burst(path: Path, grant: Grant) -> BurstLimits | None:
    """The limits above a grant; None without such a file. Raises as `read_grant`, also if the limits contradict the grant."""
    try:
        limits = burst_from_text(_text_of(path, GRANT_BYTES_LIMIT))
    except FileNotFoundError:
        return None
    if why := contradiction(limits, grant.gpus):
        raise BadDocument(why)
    return limits


def read_container_id(path: Path) -> str:
    """The runtime's ID of the container; empty while it is unknown, or if the file has other content."""
    try:
        text = _text_of(path, CONTAINER_BYTES_LIMIT).rstrip("\n")
    except (OSError, UnicodeDecodeError, BadDocument):
        return ""
    return text if is_container_id(text) else ""


def _text_of(path: Path, at_most: int) -> str:
    """Raises OSError, UnicodeDecodeError, BadDocument."""
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(fd, "rb") as file:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise BadDocument(f"{path.name} is no plain file")
        if status.st_size > at_most:
            raise BadDocument(f"{path.name} has {status.st_size} bytes: at most {at_most} are read")
        return file.read(at_most).decode("utf-8")


def same_place(one: Grant, other: Grant) -> bool:
    """The same container of the same pod with the same GPUs: only limits may differ."""
    return (one.uid, one.container, [gpu.uuid for gpu in one.gpus]) == (
        other.uid,
        other.container,
        [gpu.uuid for gpu in other.gpus],
    )


def uuid_bytes(uuid: str) -> bytes:
    """The 16 bytes behind `GPU-` or `MIG-`. Raises ValueError."""
    return UUID(uuid.partition("-")[2]).bytes

"""The grant file of one grant directory, which only the node writes and which may be anything all the same."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from uuid import UUID

from vgpu.codec import GRANT_BYTES_LIMIT, grant_from_text
from vgpu.errors import BadDocument
from vgpu.grant import Grant


def read_grant(path: Path) -> Grant:
    """Raises OSError, UnicodeDecodeError, BadDocument; never waits for what is no plain file."""
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(fd, "rb") as file:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise BadDocument("grant is no plain file")
        if status.st_size > GRANT_BYTES_LIMIT:
            raise BadDocument(f"grant has {status.st_size} bytes: at most {GRANT_BYTES_LIMIT} are read")
        return grant_from_text(file.read(GRANT_BYTES_LIMIT).decode("utf-8"))


def same_place(one: Grant, other: Grant) -> bool:
    """The same container of the same pod with the same cards: only limits may differ."""
    return (one.uid, one.container, [card.uuid for card in one.cards]) == (
        other.uid,
        other.container,
        [card.uuid for card in other.cards],
    )


def uuid_bytes(uuid: str) -> bytes:
    """The 16 bytes behind `GPU-` or `MIG-`. Raises ValueError."""
    return UUID(uuid.partition("-")[2]).bytes

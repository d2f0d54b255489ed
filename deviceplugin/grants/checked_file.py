"""Sealed records (`vgpu.api.sealed`) as files on the node's disk. What a body means is decided by the caller."""

from __future__ import annotations

from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from deviceplugin.grants.atomic_file import AnyPath, content_of, write_atomically
from vgpu.api.errors import BadDocument
from vgpu.api.sealed import UNREADABLE, seal, unseal, version_of

VERSION: Final = 2
UNSEALED: Final = 1
"""The version that had no checksum: the whole file is the body."""
BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")
"""Specified by the kernel (random(4)); the same in every container of a machine."""
LARGEST: Final = 4 * 2**20
"""Bytes of a record. Guessed: an allocation of every unit of 16 GPUs is 150 kB."""


class Checked(NamedTuple):
    """The content of a file."""

    version: int
    body: bytes


def write(path: AnyPath, body: object, *, durable: bool, temporary: AnyPath | None = None) -> None:
    """Replace the record. `durable` waits until it outlives a loss of power; `temporary` as `atomic_file.write_atomically` has it. Raises OSError."""
    write_atomically(path, seal(msgspec.json.encode(body), VERSION), 0o600, durable=durable, temporary=temporary)


def read(path: Path, what: str, *, oldest: int = VERSION) -> Checked | None:
    """The record; None when there is no such file. Raises BadDocument that names file, value and range, NewerVersion, OSError."""
    content = content_of(path)
    if content is None:
        return None
    if len(content) > LARGEST:
        raise BadDocument(f"{path} has {len(content)} bytes: {what} has at most {LARGEST}")
    try:
        version = version_of(content, oldest=oldest, newest=VERSION, name=str(path), reader="device plugin")
        return Checked(version, content if version == UNSEALED else bytes(unseal(content, name=str(path))))
    except UNREADABLE as error:
        raise BadDocument(f"{path} has {len(content)} bytes that are no {what}: {str(error)[:300]}") from None


def boot_id(path: Path = BOOT_ID) -> str:
    """Names the time since the machine started; empty when the kernel does not report it."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""

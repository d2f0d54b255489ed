"""Records on the node's disk: each with a version and a checksum, so that a damaged one is never taken for a right one.

    {"v": 2, "sha256": "<of the bytes of body>", "body": {...}}

`read` answers the bytes of the body and the version; what they mean is decided by the caller. A record of a later version
is refused, not guessed at: a later plugin may count otherwise.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from deviceplugin.grants.atomic_file import AnyPath, content_of, write_atomically
from vgpu.api.errors import BadDocument, NewerVersion

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


class _Sealed(msgspec.Struct, forbid_unknown_fields=True):
    v: int
    sha256: str
    body: msgspec.Raw


class _Version(msgspec.Struct):
    v: int


_sealed = msgspec.json.Decoder(_Sealed)
_versions = msgspec.json.Decoder(_Version)


def write(path: AnyPath, body: object, *, durable: bool, temporary: AnyPath | None = None) -> None:
    """Replace the record. `durable` waits until it outlives a loss of power; `temporary` as `atomic_file.write_atomically` has it. Raises OSError."""
    text = msgspec.json.encode(body)
    sealed = _Sealed(VERSION, hashlib.sha256(text).hexdigest(), msgspec.Raw(text))
    write_atomically(path, msgspec.json.encode(sealed), 0o600, durable=durable, temporary=temporary)


def read(path: Path, what: str, *, oldest: int = VERSION) -> Checked | None:
    """The record; None when there is no such file. Raises BadDocument that names file, value and range, NewerVersion, OSError."""
    content = content_of(path)
    if content is None:
        return None
    if len(content) > LARGEST:
        raise BadDocument(f"{path} has {len(content)} bytes: {what} has at most {LARGEST}")
    try:
        version = _versions.decode(content).v
        if not oldest <= version <= VERSION:
            newer = NewerVersion if version > VERSION else BadDocument
            raise newer(f"{path} is of version {version}: this device plugin reads versions {oldest} to {VERSION}")
        if version == UNSEALED:
            return Checked(version, content)
        sealed = _sealed.decode(content)
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise BadDocument(f"{path} has {len(content)} bytes that are no {what}: {str(error)[:300]}") from None
    found = hashlib.sha256(sealed.body).hexdigest()
    if found != sealed.sha256:
        raise BadDocument(f"{path} is damaged: its checksum is {found[:12]}, it must be {sealed.sha256[:12]!r}")
    return Checked(version, bytes(sealed.body))


def boot_id(path: Path = BOOT_ID) -> str:
    """Names the time since the machine started; empty when the kernel does not report it."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""

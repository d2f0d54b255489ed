"""The form of records on a node's disk: each with a checksum, so that a damaged one is never taken for a right one, and a file with its version.

    {"v": 2, "sha256": "<of the bytes of body>", "body": {...}}    a file
    {"sha256": "<of the bytes of body>", "body": {...}}            a line that is appended to one

What a body means is decided by the caller. A record of a later version is refused, not guessed at: a later reader may count otherwise.
"""

from __future__ import annotations

import hashlib
from typing import Final

import msgspec

from vgpu.api.errors import BadDocument, NewerVersion

UNREADABLE: Final = (msgspec.MsgspecError, UnicodeError, RecursionError)
"""What msgspec raises for bytes that are not of the expected form."""


class _Sealed(msgspec.Struct, forbid_unknown_fields=True):
    sha256: str
    body: msgspec.Raw
    v: int | None = None


class _Version(msgspec.Struct):
    v: int


_sealed = msgspec.json.Decoder(_Sealed)
_versions = msgspec.json.Decoder(_Version)


def seal(body: bytes, version: int | None = None) -> bytes:
    """The record of this body, which is JSON. Without an end of line."""
    head = b"" if version is None else b'"v":%d,' % version
    return b'{%b"sha256":"%b","body":%b}' % (head, _checksum(body).encode(), body)


def version_of(content: bytes, *, oldest: int, newest: int, name: str, reader: str) -> int:
    """The version of a record, which may have no checksum. `name`: of the record. Raises NewerVersion, BadDocument if it is older than `oldest`, and UNREADABLE."""
    version = _versions.decode(content).v
    if not oldest <= version <= newest:
        kind = NewerVersion if version > newest else BadDocument
        raise kind(f"{name} is of version {version}: this {reader} reads versions {oldest} to {newest}")
    return version


def unseal(content: bytes, *, name: str) -> msgspec.Raw:
    """The body of a record, as it was sealed. Raises BadDocument for another checksum, and UNREADABLE."""
    sealed = _sealed.decode(content)
    if (found := _checksum(sealed.body)) != sealed.sha256:
        raise BadDocument(f"{name} is damaged: its checksum is {found[:12]}, it must be {sealed.sha256[:12]!r}")
    return sealed.body


def _checksum(body: bytes | msgspec.Raw) -> str:
    return hashlib.sha256(body).hexdigest()

"""What is in an image: its layers put together, read from an OCI archive.

Only what an SBOM needs is kept: the files that run, the records of package managers, and who owns which file.
"""

from __future__ import annotations

import hashlib
import struct
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import IO, Any, Final

from hack.images.oci import BadArchive, OciArchive

RECORD_BYTES: Final = 32 << 20
"""Most that is read of one record (a list of files, a METADATA). Guessed: the largest that was seen has 60 KB."""

_BLOCK: Final = 1 << 20
_OPAQUE: Final = ".wh..wh..opq"
_WHITEOUT: Final = ".wh."
_MERGED: Final = ("bin", "lib", "lib32", "lib64", "libx32", "sbin")
"""Folders that are links into /usr on every system since 2022; lists of files still name both."""


@dataclass(frozen=True, slots=True)
class Found:
    """One file: digests in hexadecimal."""

    sha1: str
    sha256: str
    runs: bool
    """Executable, a library or Python code."""
    mtime_s: int = 0
    compiled_from_s: int | None = None
    """The time of the source that a .pyc was compiled from, modulo 2**32; None if Python does not compare it."""


@dataclass(slots=True)
class Contents:
    """One image. Paths are absolute without the leading slash, below /usr where the folder is merged into it."""

    digest: str
    """Of the manifest, `sha256:...`."""
    config: dict[str, Any]
    files: dict[str, Found] = field(default_factory=dict)
    records: dict[str, str] = field(default_factory=dict)
    """Text of the records of package managers, by path."""


def normal(path: str) -> str:
    """`./bin/sh` -> `usr/bin/sh`."""
    parts = PurePosixPath(path.lstrip("/")).parts
    return str(PurePosixPath("usr", *parts)) if parts and parts[0] in _MERGED else str(PurePosixPath(*parts))


def is_record(path: str) -> bool:
    """Is this file read as text, and not only hashed?"""
    name = PurePosixPath(path)
    if path in {"etc/os-release", "usr/lib/os-release", "var/lib/dpkg/status"}:
        return True
    if name.parent == PurePosixPath("var/lib/dpkg/info"):
        return name.suffix == ".list"
    return name.parent.suffix == ".dist-info" and name.name in {"METADATA", "RECORD"}


def read(archive: Path) -> Contents:
    """The one image in an OCI archive. Raises BadArchive."""
    with tarfile.open(archive) as tar:
        image = OciArchive(archive, tar)
        manifests = image.document("index.json").get("manifests", [])
        if len(manifests) != 1:
            raise BadArchive(
                f"{archive}: {len(manifests)} images, and an SBOM is of 1: give it the archive of one platform"
            )
        digest = str(manifests[0]["digest"])
        manifest = image.document(image.blob(digest))
        contents = Contents(digest, image.document(image.blob(manifest["config"]["digest"])))
        for layer in manifest["layers"]:
            with image.member(image.blob(layer["digest"])) as packed, tarfile.open(fileobj=packed) as members:
                _apply(members, contents)
    return contents


def _apply(layer: tarfile.TarFile, contents: Contents) -> None:
    """A layer replaces and removes files of the layers below it, never its own."""
    added: dict[str, tuple[Found, str | None]] = {}
    for member in layer:
        path = normal(member.name)
        name = PurePosixPath(path)
        if name.name == _OPAQUE:
            _remove(contents, str(name.parent), itself=False)
        elif name.name.startswith(_WHITEOUT):
            _remove(contents, str(name.with_name(name.name.removeprefix(_WHITEOUT))), itself=True)
        elif member.isdir():
            continue
        else:
            _remove(contents, path, itself=True)
            if member.isfile() or member.islnk():
                added[path] = _hard_link(member, added) if member.islnk() else _file(layer, member, path)
    for path, (found, text) in added.items():
        contents.files[path] = found
        if text is not None:
            contents.records[path] = text


def _remove(contents: Contents, path: str, *, itself: bool) -> None:
    for kept in (contents.files, contents.records):
        gone = [other for other in kept if (itself and other == path) or other.startswith(f"{path}/")]
        for other in gone:
            del kept[other]


def _hard_link(member: tarfile.TarInfo, added: dict[str, tuple[Found, str | None]]) -> tuple[Found, str | None]:
    try:
        return added[normal(member.linkname)]
    except KeyError:
        raise BadArchive(
            f"{member.name}: a hard link to {member.linkname}, which is not before it in its layer"
        ) from None


def _file(layer: tarfile.TarFile, member: tarfile.TarInfo, path: str) -> tuple[Found, str | None]:
    source = layer.extractfile(member)
    if source is None:
        raise BadArchive(f"{member.name}: no content")
    keep = is_record(path)
    if keep and member.size > RECORD_BYTES:
        raise BadArchive(f"{member.name}: {member.size} bytes, and a record has at most {RECORD_BYTES}")
    sha1, sha256, text, head = hashlib.sha1(usedforsecurity=False), hashlib.sha256(), b"", b""
    for block in _blocks(source):
        head = head or block[:16]
        sha1.update(block)
        sha256.update(block)
        text += block if keep else b""
    suffixes = PurePosixPath(path).suffixes
    runs = bool(member.mode & 0o111) or ".so" in suffixes or ".py" in suffixes
    compiled = compiled_from_s(head) if path.endswith(".pyc") else None
    found = Found(sha1.hexdigest(), sha256.hexdigest(), runs, int(member.mtime), compiled)
    return found, text.decode(errors="replace") if keep else None


def compiled_from_s(head: bytes) -> int | None:
    """Of the first 16 bytes of a .pyc: magic, flags, time, size. Source: PEP 552."""
    if len(head) < 16:
        return None
    flags, time = struct.unpack_from("<II", head, 4)
    return time if flags == 0 else None


def _blocks(source: IO[bytes]) -> Iterator[bytes]:
    while block := source.read(_BLOCK):
        yield block

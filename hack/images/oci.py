"""Read an archive of OCI layout: its documents and blobs, by name. Whoever made it is not believed: names and sizes are checked."""

from __future__ import annotations

import json
import re
import tarfile
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Final

MOST_BYTES: Final = 32 << 20
"""Of one document. Guessed: an index or a manifest has some KB."""
_DIGEST: Final = re.compile(r"sha256:([0-9a-f]{64})\Z")


class BadArchive(ValueError):
    """The archive is not what it should be; the message names the file."""


@dataclass(frozen=True, slots=True)
class OciArchive:
    """An open archive."""

    path: Path
    tar: tarfile.TarFile

    def blob(self, digest: object) -> str:
        """Name of the member with this digest. Raises BadArchive."""
        found = _DIGEST.match(str(digest))
        if found is None:
            raise BadArchive(f"{self.path}: the digest is {str(digest)[:80]!r}: it must be sha256: and 64 digits")
        return f"blobs/sha256/{found[1]}"

    def member(self, name: str) -> IO[bytes]:
        """Its content. Raises BadArchive."""
        try:
            opened = self.tar.extractfile(name)
        except KeyError:
            opened = None
        if opened is None:
            raise BadArchive(f"{self.path}: no {name}: not an OCI archive")
        return opened

    def document(self, name: str) -> dict[str, Any]:
        """A JSON object. Raises BadArchive, ValueError."""
        with self.member(name) as source:
            text = source.read(MOST_BYTES + 1)
        if len(text) > MOST_BYTES:
            raise BadArchive(f"{self.path}: {name} has over {MOST_BYTES} bytes")
        value = json.loads(text)
        if not isinstance(value, dict):
            raise BadArchive(f"{self.path}: {name} is no object")
        return value

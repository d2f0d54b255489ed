"""Join OCI archives of one image, one for each platform, to an archive whose index has them all.

A container runtime takes from an index the image of its own platform, so one name serves nodes of both architectures. Each archive is built on a machine of its platform:
by `hack.images build` with buildah, or by `docker buildx build --output type=oci`. (With both platforms at hand, `docker buildx build --platform linux/amd64,linux/arm64` makes an index itself.)

The same archives give the same bytes. A blob whose digest is not its name is refused.
"""

from __future__ import annotations

import hashlib
import io
import json
import re
import tarfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

INDEX: Final = "application/vnd.oci.image.index.v1+json"
MANIFEST: Final = "application/vnd.oci.image.manifest.v1+json"
_DIGEST = re.compile(r"sha256:([0-9a-f]{64})\Z")
_BLOCK: Final = 1 << 20


class BadArchive(ValueError):
    """It is no OCI archive of one image, or does not fit the others."""


def join(target: Path, name: str, archives: Sequence[Path]) -> list[str]:
    """Write the index `name` (host/path:tag) of these archives to `target`. Returns their platforms, as `linux/arm64`. Raises BadArchive, OSError."""
    entries: dict[str, dict[str, Any]] = {}
    part = target.with_name(f"{target.name}.part")
    try:
        with tarfile.open(part, "w", format=tarfile.GNU_FORMAT) as joined:
            written: set[str] = set()
            for path in archives:
                entry, platform = _copy(path, joined, written)
                if platform in entries:
                    raise BadArchive(f"{path}: another archive has an image for {platform}, too")
                entries[platform] = entry
            if not entries:
                raise BadArchive("no archive was given")
            manifests = [entries[platform] for platform in sorted(entries)]
            text = json.dumps({"schemaVersion": 2, "mediaType": INDEX, "manifests": manifests}, sort_keys=True).encode()
            digest = hashlib.sha256(text).hexdigest()
            names = {"io.containerd.image.name": name, "org.opencontainers.image.ref.name": name}
            top = {"mediaType": INDEX, "digest": f"sha256:{digest}", "size": len(text), "annotations": names}
            _add(joined, f"blobs/sha256/{digest}", text)
            _add(joined, "oci-layout", b'{"imageLayoutVersion": "1.0.0"}')
            _add(joined, "index.json", json.dumps({"schemaVersion": 2, "manifests": [top]}, sort_keys=True).encode())
        part.rename(target)
    finally:
        part.unlink(missing_ok=True)
    return sorted(entries)


def _copy(path: Path, joined: tarfile.TarFile, written: set[str]) -> tuple[dict[str, Any], str]:
    """Copy the blobs of an archive. Its image's entry in the index, and its platform."""
    try:
        with tarfile.open(path) as archive:
            (found,) = _json(archive, "index.json")["manifests"]
            manifest = _json(archive, _blob(found))
            config = _json(archive, _blob(manifest["config"]))
            platform = {"architecture": str(config["architecture"]), "os": str(config["os"])}
            if config.get("variant"):
                platform["variant"] = str(config["variant"])
            for of in sorted({_blob(one) for one in (found, manifest["config"], *manifest["layers"])} - written):
                _copy_blob(archive, of, joined)
                written.add(of)
    except (KeyError, TypeError, ValueError, tarfile.TarError) as error:
        if isinstance(error, BadArchive):
            raise BadArchive(f"{path}: {error}") from None
        raise BadArchive(f"{path}: it is no OCI archive of one image: {error}") from None
    entry = {"mediaType": MANIFEST, "digest": found["digest"], "size": found["size"], "platform": platform}
    return entry, "/".join((platform["os"], platform["architecture"], *filter(None, [platform.get("variant")])))


def _blob(entry: dict[str, Any]) -> str:
    """Where in an archive the blob lies that an entry means."""
    digest = _DIGEST.match(str(entry["digest"]))
    if digest is None:
        raise BadArchive(f"the digest is {str(entry['digest'])[:80]!r}: it must be sha256: and 64 digits")
    return f"blobs/sha256/{digest[1]}"


def _json(archive: tarfile.TarFile, name: str) -> dict[str, Any]:
    content = archive.extractfile(name)
    if content is None:
        raise BadArchive(f"{name} is no file")
    found = json.load(content)
    if not isinstance(found, dict):
        raise BadArchive(f"{name} is no object")
    return found


def _copy_blob(archive: tarfile.TarFile, name: str, joined: tarfile.TarFile) -> None:
    for copy in (False, True):  # the first time only to compare
        content = archive.extractfile(name)
        if content is None:
            raise BadArchive(f"{name} is no file")
        if copy:
            info = tarfile.TarInfo(name)
            info.size = archive.getmember(name).size
            joined.addfile(info, content)
            continue
        digest = hashlib.sha256()
        while block := content.read(_BLOCK):
            digest.update(block)
        if digest.hexdigest() != name.rpartition("/")[2]:
            raise BadArchive(f"{name} has the digest {digest.hexdigest()}")


def _add(archive: tarfile.TarFile, name: str, content: bytes) -> None:
    info = tarfile.TarInfo(name)
    info.size = len(content)
    archive.addfile(info, io.BytesIO(content))

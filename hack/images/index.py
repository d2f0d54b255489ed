"""Join OCI archives of one image, one for each platform, to an archive whose index has them all.

A container runtime takes from an index the image of its own platform, so one name serves nodes of both architectures. Each archive is built on a machine of its platform:
by `hack.images build` with buildah, or by `docker buildx build --output type=oci`. (With both platforms at hand, `docker buildx build --platform linux/amd64,linux/arm64` makes an index itself.)

The same archives give the same bytes. A blob whose digest is not its name is refused.
"""

from __future__ import annotations

import hashlib
import io
import json
import tarfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from hack.images.oci import BadArchive, OciArchive

INDEX: Final = "application/vnd.oci.image.index.v1+json"
MANIFEST: Final = "application/vnd.oci.image.manifest.v1+json"
_BLOCK: Final = 1 << 20


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
        with tarfile.open(path) as tar:
            archive = OciArchive(path, tar)
            (found,) = archive.document("index.json")["manifests"]
            manifest = archive.document(archive.blob(found["digest"]))
            config = archive.document(archive.blob(manifest["config"]["digest"]))
            platform = {"architecture": str(config["architecture"]), "os": str(config["os"])}
            if config.get("variant"):
                platform["variant"] = str(config["variant"])
            parts = (found, manifest["config"], *manifest["layers"])
            for of in sorted({archive.blob(one["digest"]) for one in parts} - written):
                _copy_blob(archive, of, joined)
                written.add(of)
    except BadArchive:
        raise
    except (KeyError, TypeError, ValueError, tarfile.TarError) as error:
        raise BadArchive(f"{path}: it is no OCI archive of one image: {error}") from None
    entry = {"mediaType": MANIFEST, "digest": found["digest"], "size": found["size"], "platform": platform}
    return entry, "/".join((platform["os"], platform["architecture"], *filter(None, [platform.get("variant")])))


def _copy_blob(archive: OciArchive, name: str, joined: tarfile.TarFile) -> None:
    """If its digest is its name. Raises BadArchive."""
    digest = hashlib.sha256()
    with archive.member(name) as content:
        while block := content.read(_BLOCK):
            digest.update(block)
    if digest.hexdigest() != name.rpartition("/")[2]:
        raise BadArchive(f"{archive.path}: {name} has the digest {digest.hexdigest()}")
    info = tarfile.TarInfo(name)
    info.size = archive.tar.getmember(name).size
    with archive.member(name) as content:
        joined.addfile(info, content)


def _add(archive: tarfile.TarFile, name: str, content: bytes) -> None:
    info = tarfile.TarInfo(name)
    info.size = len(content)
    archive.addfile(info, io.BytesIO(content))

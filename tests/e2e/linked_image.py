"""An image archive (OCI) with symbolic links on top of another image's files: what the author of an image may put where Tangram mounts."""

from __future__ import annotations

import hashlib
import io
import json
import tarfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

NAME_KEYS: Final = ("io.containerd.image.name", "org.opencontainers.image.ref.name")
PLAIN_LAYER: Final = "application/vnd.oci.image.layer.v1.tar"


def write(source: Path, target: Path, name: str, links: Mapping[str, str]) -> None:
    """`links`: path in the image without the first slash -> where it leads."""
    with tarfile.open(source) as old, tarfile.open(target, "w") as new:

        def read(digest: str) -> dict[str, Any]:
            found = old.extractfile(f"blobs/sha256/{digest.removeprefix('sha256:')}")
            assert found is not None
            document: dict[str, Any] = json.load(found)
            return document

        def blob(content: bytes, media_type: str) -> dict[str, Any]:
            digest = hashlib.sha256(content).hexdigest()
            _add(new, f"blobs/sha256/{digest}", content)
            return {"mediaType": media_type, "digest": f"sha256:{digest}", "size": len(content)}

        index = old.extractfile("index.json")
        assert index is not None
        (entry,) = json.load(index)["manifests"]
        manifest = read(entry["digest"])
        config = read(manifest["config"]["digest"])
        layer = blob(_layer(links), PLAIN_LAYER)
        config["rootfs"]["diff_ids"].append(layer["digest"])
        config.pop("history", None)
        manifest["config"] = blob(json.dumps(config).encode(), manifest["config"]["mediaType"])
        for kept in manifest["layers"]:
            member = old.getmember(f"blobs/sha256/{kept['digest'].removeprefix('sha256:')}")
            new.addfile(member, old.extractfile(member))
        manifest["layers"].append(layer)
        entry = blob(json.dumps(manifest).encode(), entry["mediaType"]) | {
            "annotations": dict.fromkeys(NAME_KEYS, name)
        }
        _add(new, "oci-layout", b'{"imageLayoutVersion": "1.0.0"}')
        _add(new, "index.json", json.dumps({"schemaVersion": 2, "manifests": [entry]}).encode())


def _layer(links: Mapping[str, str]) -> bytes:
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w") as layer:
        for path, leads_to in links.items():
            info = tarfile.TarInfo(path)
            info.type, info.linkname = tarfile.SYMTYPE, leads_to
            layer.addfile(info)
    return made.getvalue()


def _add(archive: tarfile.TarFile, name: str, content: bytes) -> None:
    info = tarfile.TarInfo(name)
    info.size = len(content)
    archive.addfile(info, io.BytesIO(content))

"""Write an OCI image archive of one layer out of files on disk.

Enough for an image that is one static program: no builder, no base, no network, and a second instead of half a minute.
The same files give the same bytes: names, modes and contents are all that counts.
"""

from __future__ import annotations

import hashlib
import io
import json
import tarfile
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

_BLOCK: Final = 1 << 20


def _plain(info: tarfile.TarInfo) -> tarfile.TarInfo:
    """Root's, of no particular time."""
    info.uid = info.gid = info.mtime = 0
    info.uname = info.gname = ""
    return info


def _layer(files: Mapping[str, Path], target: Path) -> None:
    with tarfile.open(target, "w") as layer:
        folders = {str(parent) for name in files for parent in Path(name).parents} - {"."}
        for folder in sorted(folders):
            info = tarfile.TarInfo(folder)
            info.type, info.mode = tarfile.DIRTYPE, 0o755
            layer.addfile(info)
        for name, source in sorted(files.items()):
            info = _plain(layer.gettarinfo(str(source.resolve()), name))
            info.mode = 0o755
            with source.open("rb") as content:
                layer.addfile(info, content)


def _digest(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as content:
        while block := content.read(_BLOCK):
            digest.update(block)
    return digest.hexdigest()


def write(
    target: Path,
    name: str,
    files: Mapping[str, Path],
    entrypoint: Sequence[str],
    user: str = "",
    architecture: str = "amd64",
) -> None:
    """An archive at `target` with one image called `name` (host/path:tag); `files` are absolute paths without the slash."""
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch, tarfile.open(target, "w") as archive:
        layer = Path(scratch) / "layer.tar"
        _layer(files, layer)
        layer_digest = _digest(layer)
        layer_size = layer.stat().st_size
        layer.rename(layer.with_name(layer_digest))
        archive.add(layer.with_name(layer_digest), f"blobs/sha256/{layer_digest}", filter=_plain)

        def blob(content: dict[str, Any], kind: str) -> dict[str, Any]:
            text = json.dumps(content, sort_keys=True).encode()
            digest = hashlib.sha256(text).hexdigest()
            _add(archive, f"blobs/sha256/{digest}", text)
            return {
                "mediaType": f"application/vnd.oci.image.{kind}.v1+json",
                "digest": f"sha256:{digest}",
                "size": len(text),
            }

        settings = {"Env": ["PATH=/usr/local/bin:/usr/bin:/bin"], "Entrypoint": list(entrypoint), "User": user}
        config = {
            "architecture": architecture,
            "os": "linux",
            "config": settings,
            "rootfs": {"type": "layers", "diff_ids": [f"sha256:{layer_digest}"]},
        }
        layer_entry = {
            "mediaType": "application/vnd.oci.image.layer.v1.tar",
            "digest": f"sha256:{layer_digest}",
            "size": layer_size,
        }
        manifest = {"schemaVersion": 2, "config": blob(config, "config"), "layers": [layer_entry]}
        entry = blob(manifest, "manifest")
        entry["annotations"] = {"io.containerd.image.name": name, "org.opencontainers.image.ref.name": name}
        _add(archive, "oci-layout", b'{"imageLayoutVersion": "1.0.0"}')
        _add(archive, "index.json", json.dumps({"schemaVersion": 2, "manifests": [entry]}).encode())


def _add(archive: tarfile.TarFile, name: str, content: bytes) -> None:
    info = tarfile.TarInfo(name)
    info.size = len(content)
    archive.addfile(info, io.BytesIO(content))

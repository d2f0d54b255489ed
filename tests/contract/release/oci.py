"""Small OCI archives: each layer is path -> content, None for an empty folder."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import tarfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

Layer = Mapping[str, bytes | str | None]


def layer(files: Layer) -> bytes:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as tar:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.mode = 0o755 if name.split("/")[-2:-1] == ["bin"] else 0o644
            if content is None:
                member.type = tarfile.DIRTYPE
            elif isinstance(content, str) and content.startswith("-> "):
                member.type, member.linkname = tarfile.LNKTYPE, content[3:]
            data = content.encode() if isinstance(content, str) else content or b""
            member.size = len(data) if member.isreg() else 0
            tar.addfile(member, io.BytesIO(data))
    return gzip.compress(packed.getvalue(), mtime=0)


def archive(path: Path, layers: Sequence[Layer], env: Sequence[str] = ()) -> str:
    """Write the archive. Returns the digest of the manifest."""
    with tarfile.open(path, "w") as tar:

        def add(name: str, content: bytes) -> None:
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))

        def blob(content: bytes) -> str:
            digest = hashlib.sha256(content).hexdigest()
            add(f"blobs/sha256/{digest}", content)
            return f"sha256:{digest}"

        config: dict[str, Any] = {
            "architecture": "amd64",
            "created": "2026-11-27T10:00:00.25Z",
            "config": {"Env": list(env)},
        }
        manifest = {
            "config": {"digest": blob(json.dumps(config).encode())},
            "layers": [{"digest": blob(layer(files))} for files in layers],
        }
        digest = blob(json.dumps(manifest).encode())
        add("index.json", json.dumps({"manifests": [{"digest": digest}]}).encode())
    return digest

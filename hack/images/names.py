"""Give the image of an archive other names.

An archive of OCI layout has them in the entries of `index.json`, one of `docker save` in `manifest.json`, and some have both.
"""

from __future__ import annotations

import io
import json
import tarfile
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

BY_CONTAINERD: Final = "io.containerd.image.name"
BY_REFERENCE: Final = "org.opencontainers.image.ref.name"


def _in_index(index: Any, names: Sequence[str]) -> Any:
    (entry,) = index["manifests"]
    others = {
        key: value for key, value in entry.get("annotations", {}).items() if key not in (BY_CONTAINERD, BY_REFERENCE)
    }
    named = [entry | {"annotations": others | dict.fromkeys((BY_CONTAINERD, BY_REFERENCE), name)} for name in names]
    return index | {"manifests": named}


def _in_manifest(manifests: Any, names: Sequence[str]) -> Any:
    (entry,) = manifests
    return [entry | {"RepoTags": list(names)}]


_LISTS: Final[Mapping[str, Callable[[Any, Sequence[str]], Any]]] = {
    "index.json": _in_index,
    "manifest.json": _in_manifest,
}


def rename(archive: Path, names: Sequence[str]) -> None:
    """The one image of the archive has these names afterwards, and no other. The archive is replaced when the new one is complete."""
    with tempfile.TemporaryDirectory(dir=archive.parent) as scratch:
        renamed = Path(scratch) / archive.name
        with tarfile.open(archive) as old, tarfile.open(renamed, "w") as new:
            for member in old:
                content = old.extractfile(member) if member.isfile() else None
                if content is not None and (change := _LISTS.get(member.name)) is not None:
                    text = json.dumps(change(json.load(content), names)).encode()
                    member.size, content = len(text), io.BytesIO(text)
                new.addfile(member, content)
        renamed.replace(archive)

"""Which images there are, and what each depends on.

Pure but for reading sources: the key of an image covers every file that can change it, so a cached archive is good for
as long as its key is the same.
"""

from __future__ import annotations

import fnmatch
import hashlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from hack import previous
from hack.cluster.layout import cache_folder

ROOT: Final = Path(__file__).resolve().parents[2]
DOCKERFILE: Final = Path("deploy/images/Dockerfile")
"""From the root of a source tree, as the next."""
IGNORED: Final = DOCKERFILE.with_name("Dockerfile.dockerignore")


@dataclass(frozen=True, slots=True)
class Image:
    """`target` is a stage of the Dockerfile; `sources` are the first path elements of what it is built from."""

    name: str
    target: str
    sources: tuple[str, ...]
    all_but: bool = False
    """Built from everything except `sources`."""
    root: Path = ROOT
    """Of the source tree."""
    commit: str = ""
    """Of the tree; empty: git knows it."""
    names: tuple[str, ...] = ()
    """By which a cluster knows it, of public images whose place it takes. Empty: by `name`. The builder never gives an image these names: they would
    hide the public ones on the machine."""

    def uses(self, path: str) -> bool:
        """Does the image depend on this file of the build context?"""
        if path.startswith("deploy/images/"):
            return True
        return (path.split("/")[0] in self.sources) is not self.all_but


PYTHON: Final = Image("localhost/tangram-python:dev", "python", (), names=("docker.io/library/python:3.13-slim",))
STAND_IN: Final = Image(
    "localhost/tangram-stand-in:dev",
    "stand-in",
    (),
    names=(
        "docker.io/pytorch/pytorch:2.8.0-cuda12.8-cudnn9-runtime",
        "docker.io/vllm/vllm-openai:v0.11.2",
        "quay.io/jupyter/pytorch-notebook:cuda12-2025-07-07",
    ),
)
"""In the place of images that are too large to build here."""
TANGRAM: Final = Image("localhost/tangram:dev", "tangram", ("examples",), all_but=True)
FAKE_DRIVER: Final = Image("localhost/tangram-fake-driver:dev", "fake-driver", ("shim", "pyproject.toml", "uv.lock"))
WORKLOAD: Final = Image("localhost/tangram-workload:dev", "workload", ("examples",))
IMAGES: Final = (PYTHON, STAND_IN, WORKLOAD, FAKE_DRIVER, TANGRAM)
"""In the order of the Dockerfile's stages, so that each build finds the stages before it done."""


def previous_image() -> Image:
    """Of the release before this one, from its own sources, under a name of its own."""
    tree = previous.sources(cache_folder() / "previous")
    name = f"localhost/tangram-previous:{previous.version(tree)}"
    return replace(TANGRAM, name=name, root=tree, commit=previous.commit())


def is_ignored(path: str, patterns: Sequence[str]) -> bool:
    """Does one of the patterns (those of an ignore file; `*`, `?` and a leading `**/`) leave this path out?"""
    parts = path.split("/")
    for pattern in patterns:
        anywhere = pattern.startswith("**/")
        wanted = pattern.removeprefix("**/").split("/")
        starts = range(len(parts)) if anywhere else range(1)
        for start in starts:
            part = parts[start : start + len(wanted)]
            if len(part) == len(wanted) and all(map(fnmatch.fnmatchcase, part, wanted)):
                return True
    return False


def patterns(text: str) -> list[str]:
    return [line.strip() for line in text.splitlines() if line.strip() and not line.startswith("#")]


def context_files(root: Path = ROOT) -> Iterator[str]:
    """Relative paths of the build context, sorted."""
    left_out = patterns((root / IGNORED).read_text())
    for folder, names, files in os.walk(root):
        inside = Path(folder).relative_to(root)
        names[:] = sorted(name for name in names if not is_ignored(str(inside / name), left_out))
        yield from (path for file in sorted(files) if not is_ignored(path := str(inside / file), left_out))


def image_key(image: Image, base: str, files: Sequence[str]) -> str:
    """16 hex digits over the base and every file that the image uses."""
    digest = hashlib.sha256(f"{' '.join((image.name, *image.names))} {base}\0".encode())
    for path in filter(image.uses, files):
        source = image.root / path
        digest.update(f"{path}\0{source.stat().st_mode & 0o777:o}\0".encode() + source.read_bytes() + b"\0")
    return digest.hexdigest()[:16]

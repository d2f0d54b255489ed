"""Build the library, the wheel and the image twice, and compare the bytes.

Each time the sources are in another folder and nothing compiled is used again. What both builds share is what a release pins: the
compiler of the lock file, the base image, and the downloads. Measured on two busy cores: fourteen minutes, ten of them for the image, so a
release runs it and not each change.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from hack.cluster.caller import make_folder
from hack.cluster.console import Steps
from hack.cluster.layout import cache_folder
from hack.images.buildah import Buildah
from hack.images.catalogue import ROOT, TANGRAM

TARGET: Final = "x86_64-linux-gnu.2.17"
"""As the Dockerfile has it: the oldest glibc that a released library loads into."""


def copy_sources(to: Path) -> None:
    """The files that git knows or would know, so that no result of an earlier build comes along."""
    listed = subprocess.run(
        ["git", "-C", str(ROOT), "-c", f"safe.directory={ROOT}", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        capture_output=True, check=True,
    )  # fmt: skip
    for name in filter(None, listed.stdout.decode().split("\0")):
        if (ROOT / name).is_file():
            target = to / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, target)


def library(scratch: Path) -> dict[str, str]:
    """SHA-256 of what the interception library consists of, by file name.

    zig compiles its own start files where it is called, and they keep its path and that folder's. So it is called from one folder here;
    a release compiles in the image, where both are always the same.
    """
    sources, out = scratch / "sources", scratch / "out"
    copy_sources(sources)
    compiler = f"{sys.executable} -m ziglang cc -target {TARGET}"
    environment = {
        **os.environ,
        "ZIG_GLOBAL_CACHE_DIR": str(scratch / "zig"),
        "ZIG_LOCAL_CACHE_DIR": str(scratch / "zig"),
    }
    make = [
        "make",
        "-s",
        f"-j{os.cpu_count()}",
        "-f",
        str(sources / "shim/Makefile"),
        f"CC={compiler}",
        f"BUILD={out}",
        "lib",
    ]
    subprocess.run([*make, f"PYTHON={sys.executable}"], check=True, cwd="/", env=environment)
    return {path.name: _sha256(path) for path in sorted(out.iterdir()) if path.is_file()}


def wheel(scratch: Path) -> dict[str, str]:
    """SHA-256 of the wheel, by file name."""
    sources, out = scratch / "sources", scratch / "wheel"
    copy_sources(sources)
    subprocess.run(["uv", "build", "--quiet", "--wheel", "--out-dir", str(out)], cwd=sources, check=True)
    return {path.name: _sha256(path) for path in sorted(out.glob("*.whl"))}


def image(scratch: Path) -> dict[str, str]:
    """Digests of the image's manifest and, to see where a difference is, of its layers. Docker is not used: this is about one base."""
    builder = Buildah(cache_folder() / "images")
    builder.make_base(Steps())
    archive, objects = scratch / "image.tar", scratch / "objects"
    make_folder(objects)
    builder.build(TANGRAM, archive, objects)
    return digests(archive)


def digests(archive: Path) -> dict[str, str]:
    """`sha256:...` of the manifest, the config and each layer of the one image in an OCI archive."""
    with tarfile.open(archive) as tar:
        (described,) = _json(tar, archive, "index.json")["manifests"]
        digest = str(described["digest"])
        manifest = _json(tar, archive, "blobs/" + digest.replace(":", "/"))
    layers = {f"layer {number}": str(layer["digest"]) for number, layer in enumerate(manifest["layers"])}
    return {"manifest": digest, "config": str(manifest["config"]["digest"]), **layers}


def _json(tar: tarfile.TarFile, archive: Path, name: str) -> Any:
    try:
        content = tar.extractfile(name)
    except KeyError:
        content = None
    if content is None:
        raise LookupError(f"{archive}: no {name}: not an OCI archive")
    return json.load(content)


PARTS: Final[Mapping[str, Callable[[Path], dict[str, str]]]] = {"library": library, "wheel": wheel, "image": image}


def compare(part: str) -> list[str]:
    """Sentences about what differs between two builds of one part; none if they are the same. Prints what was built."""
    results = []
    for name in ("first", "a-second-folder"):
        with tempfile.TemporaryDirectory(prefix=f"tangram-{part}-", suffix=f"-{name}") as scratch:
            results.append(PARTS[part](Path(scratch)))
    first, second = results
    if not first:
        return [f"{part}: nothing was built"]
    for name, digest in first.items():
        print(f"{part}: {name} {digest}")
    return differences(part, first, second)


def differences(part: str, first: Mapping[str, str], second: Mapping[str, str]) -> list[str]:
    """Sentences about what two builds do not have in common."""
    return [
        f"{part}: {name} is {first.get(name)} at first and {second.get(name)} the second time"
        for name in sorted(first.keys() | second.keys())
        if first.get(name) != second.get(name)
    ]


def _sha256(path: Path) -> str:
    with path.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()

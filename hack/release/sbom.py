"""The SBOM of an image archive: reads it, compares its Python packages with uv.lock, and writes SPDX."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

from hack.images.catalogue import ROOT
from hack.images.oci import BadArchive
from hack.release import contents, packages, spdx
from hack.release.version import version


def locked(root: Path = ROOT) -> dict[str, frozenset[str]]:
    """Name -> versions of every package in uv.lock."""
    found: dict[str, frozenset[str]] = {}
    for package in tomllib.loads((root / "uv.lock").read_text())["package"]:
        if "version" in package:
            name = packages.canonical(package["name"])
            found[name] = found.get(name, frozenset()) | {package["version"]}
    return found


def sbom(archive: Path) -> dict[str, Any]:
    """SPDX 2.3 of the image in an OCI archive. Raises BadArchive, also where the image has Python packages that
    uv.lock has not, or compiled files that Python would ignore."""
    image = contents.read(archive)
    found = packages.packages(image)
    lock = locked()
    wrong = packages.differences(found, lock)
    if wrong:
        raise BadArchive(f"{archive}: not of this tree's lock file: {'; '.join(wrong)}")
    ignored = packages.stale(image)
    if ignored:
        raise BadArchive(
            f"{archive}: {len(ignored)} compiled Python files are older than their source, such as {ignored[0]}"
        )
    (compiler,) = lock["ziglang"]
    return spdx.document(image, found, packages.unowned(image, found), version=version(), compiler=compiler)


def write(archive: Path, to: Path) -> None:
    to.write_text(json.dumps(sbom(archive), indent=1) + "\n")

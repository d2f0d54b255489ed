"""The plugin `tangram` for krew: an archive with one script, and a manifest that names it by its digest. Pure but for the project's files.

The script runs the program of exactly this release from PyPI, because tangramctl is no single file: it stands on compiled packages of the
machine's own Python. Source of the manifest's fields: krew's developer guide and its v1alpha2 API.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import tarfile
import tomllib
from collections.abc import Mapping
from typing import Any, Final

import yaml

from hack.images.catalogue import ROOT
from hack.release.version import version

DOWNLOADS: Final = "https://github.com/tangram-sh/tangram/releases/download"
PLUGIN: Final = "kubectl-tangram"
SCRIPT: Final = """#!/bin/sh
# kubectl tangram, of {requirement} and no other version.
if command -v uv >/dev/null 2>&1; then
    exec uv tool run --from {requirement} kubectl-tangram "$@"
elif command -v pipx >/dev/null 2>&1; then
    exec pipx run --spec {requirement} kubectl-tangram "$@"
fi
echo "kubectl tangram: needs uv or pipx, which run {requirement} from PyPI" >&2
exit 127
"""


OTHERS: Final = frozenset({"tangram"})
"""Names that are other projects' on PyPI: a script that runs one of them would run their code. Looked up with pip, 2026-11-27."""


def requirement(project: Mapping[str, Any] | None = None) -> str:
    """What PyPI calls this release; `project` is that table of pyproject.toml. Raises LookupError while the name is another project's."""
    named = project or tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    if named["name"] in OTHERS:
        raise LookupError(
            f"pyproject.toml: PyPI's {named['name']} is another project's: rename the package before a release"
        )
    return f"{named['name']}=={named['version']}"


def file_name() -> str:
    return f"{PLUGIN}-{version()}.tar.gz"


def archive(wanted: str) -> bytes:
    """For a requirement of pip. The same bytes each time."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w", format=tarfile.USTAR_FORMAT) as tar:
        for name, content, mode in (
            ("LICENSE", (ROOT / "LICENSE").read_bytes(), 0o644),
            (PLUGIN, SCRIPT.format(requirement=wanted).encode(), 0o755),
        ):
            member = tarfile.TarInfo(name)
            member.size, member.mode = len(content), mode
            tar.addfile(member, io.BytesIO(content))
    return gzip.compress(packed.getvalue(), mtime=0)


def manifest(packed: bytes, wanted: str) -> str:
    """YAML for krew-index, of the archive as it will be downloaded."""
    described: dict[str, Any] = {
        "apiVersion": "krew.googlecontainertools.github.com/v1alpha2",
        "kind": "Plugin",
        "metadata": {"name": "tangram"},
        "spec": {
            "version": f"v{version()}",
            "homepage": "https://github.com/tangram-sh/tangram",
            "shortDescription": "See and explain shares of GPUs",
            "description": "Shows the GPUs of a node with health and cordons, keeps new pods off one GPU, and explains why a pod\n"
            "that requests a share of a GPU is Pending. It calls kubectl with your rights.\n",
            "caveats": f"The plugin runs {wanted} from PyPI with uv or pipx. Python 3.11 or newer is needed.\n",
            "platforms": [
                {
                    "selector": {"matchExpressions": [{"key": "os", "operator": "In", "values": ["linux", "darwin"]}]},
                    "uri": f"{DOWNLOADS}/v{version()}/{file_name()}",
                    "sha256": hashlib.sha256(packed).hexdigest(),
                    "bin": PLUGIN,
                    "files": [{"from": name, "to": "."} for name in (PLUGIN, "LICENSE")],
                }
            ],
        },
    }
    return yaml.safe_dump(described, sort_keys=False)

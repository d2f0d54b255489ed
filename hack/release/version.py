"""The version is in pyproject.toml; this module knows the copies of it, which other tools want in their own files.

`shim/Makefile` reads pyproject.toml itself. A copy here is a file and a pattern with one group, the version.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from hack.images.catalogue import ROOT

_ANY: Final = r"(\d+\.\d+\.\d+(?:-(?:alpha|beta|rc)\.\d+)?)"
COPIES: Final = {
    "clients/python/pyproject.toml": (rf'^version = "{_ANY}"$',),
    "deploy/helm/tangram/Chart.yaml": (rf"^version: {_ANY}$", rf"^appVersion: {_ANY}$", rf"/tangram:{_ANY}$"),
    "README.md": (rf"/tangram:{_ANY}\b", rf"image\.tag={_ANY}\b", rf"^Version {_ANY} is"),
    "docs/tasks/install.md": (rf"/tangram:{_ANY}\b", rf"image\.tag={_ANY}\b", rf"^Version {_ANY} is"),
    "docs/reference/tangramctl.md": (rf"\btangram-{_ANY}-py3",),
}
"""Path from the root -> patterns, each of which is found at least once."""


class BadVersion(ValueError):
    """Not a version that a release can have."""


def version(root: Path = ROOT) -> str:
    """Of this tree."""
    return str(tomllib.loads((root / "pyproject.toml").read_text())["project"]["version"])


def differences(root: Path = ROOT) -> Iterator[str]:
    """Sentences about copies that are missing or differ."""
    ours = version(root)
    for name, patterns in COPIES.items():
        text = (root / name).read_text()
        for pattern in patterns:
            found = set(re.findall(pattern, text, re.MULTILINE))
            if found != {ours}:
                yield f"{name}: {pattern} finds {', '.join(sorted(found)) or 'nothing'}, and pyproject.toml has {ours}"


def write(wanted: str, root: Path = ROOT) -> list[str]:
    """Set the version everywhere. Returns the files that were changed; uv.lock is `uv lock`'s to change."""
    if not re.fullmatch(_ANY, wanted):
        raise BadVersion(f"version {wanted!r}: MAJOR.MINOR.PATCH, and -alpha.N, -beta.N or -rc.N behind it")
    changed = []
    for name, patterns in {"pyproject.toml": (rf'^version = "{_ANY}"$',), **COPIES}.items():
        path = root / name
        before = after = path.read_text()
        for pattern in patterns:
            after = re.sub(pattern, lambda found: found[0].replace(found[1], wanted), after, flags=re.MULTILINE)
        if after != before:
            path.write_text(after)
            changed.append(name)
    return changed

"""The text of a release, and the chart with the image's digest in it. Both are of the tree that is released."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

from hack.images.catalogue import ROOT

DIGEST: Final = re.compile(r"sha256:[0-9a-f]{64}")
_VALUE: Final = re.compile(r'(?m)^(image:\n(?:(?:  .*)?\n)*?  digest: )"[^"]*"$')


def notes(version: str, changelog: str) -> str:
    """The changelog's section of a version. Raises LookupError if it has none, or an empty one."""
    found = re.search(rf"(?ms)^## \[{re.escape(version)}\][^\n]*\n(.*?)(?=^## |\Z)", changelog)
    if found is None or not found[1].strip():
        raise LookupError(f"CHANGELOG.md: no section ## [{version}] with text")
    return found[1].strip() + "\n"


def pinned(digest: str, values: str) -> str:
    """values.yaml with `image.digest` set."""
    if not DIGEST.fullmatch(digest):
        raise ValueError(f"digest {digest!r}: sha256: and 64 hexadecimal digits")
    text, count = _VALUE.subn(rf'\g<1>"{digest}"', values)
    if count != 1:
        raise LookupError(f"values.yaml: {count} lines are image.digest, and 1 is expected")
    return text


def changelog(root: Path = ROOT) -> str:
    return (root / "CHANGELOG.md").read_text()

"""A driver library as an older driver has it: without some of its functions.

The names are overwritten in a copy of the library, so that the loader does not find them. Names of one library never are each other's
endings (all begin with `nvml` or `cu`), so no other name shares the bytes.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path


def without(library: Path, names: Iterable[str], copy: Path) -> Path:
    """Write `library` to `copy` without the functions named. AssertionError for a name that the library does not have."""
    content = bytearray(library.read_bytes())
    for name in names:
        wanted = b"\0" + name.encode() + b"\0"
        assert wanted in content, f"{library.name} has no {name}"
        at = content.find(wanted)
        while at >= 0:
            content[at + 1 : at + 5] = b"gone"
            at = content.find(wanted, at)
    copy.write_bytes(content)
    return copy

"""The file that names the GPUs which NVML does not open, because an operator is to reset or replace them: a PCI address a line.

The device plugin writes it when a cordoned GPU has no more users, and its supervisor reads it: also after a restart, before the API server answers.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from vgpu.health.presence import bus_address

MOST_BYTES: Final = 64 * 1024
_ADDRESS: Final = re.compile(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]\Z")


def addresses(texts: Iterable[str]) -> frozenset[str]:
    """Each in the form that NVML and sysfs have in common."""
    return frozenset(map(bus_address, texts))


def read_withheld(path: Path) -> frozenset[str]:
    """What is no address is passed over; so is a file that is not there."""
    try:
        with path.open(errors="replace") as file:
            lines = file.read(MOST_BYTES).split()
    except OSError:
        return frozenset()
    return frozenset(one for one in addresses(lines) if _ADDRESS.match(one))


def write_withheld(path: Path, withheld: Iterable[str]) -> bool:
    """Whole or not at all. Returns whether it changed. Raises OSError."""
    text = "".join(f"{one}\n" for one in sorted(addresses(withheld)))
    if (path.read_text(errors="replace") if path.exists() else "") == text:
        return False
    fresh = path.with_name(f".{path.name}.new")
    with fresh.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    fresh.replace(path)
    return True


def changed_from(before: frozenset[str], now: frozenset[str]) -> str:
    """What is another than before, in words."""
    parts = [f"{', '.join(sorted(now - before))} is released"] if now - before else []
    parts += [f"{', '.join(sorted(before - now))} is no longer released"] if before - now else []
    return f"the GPUs that NVML leaves out changed: {'; '.join(parts)}"

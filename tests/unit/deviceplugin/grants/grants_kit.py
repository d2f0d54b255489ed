"""Grant directories for tests: a state folder with a library, and records of allocations."""

from __future__ import annotations

from pathlib import Path

from deviceplugin.grants.allocation_record import Record
from deviceplugin.grants.grant_directories import GrantDirectories
from tests.unit.deviceplugin.builders import uuid


def record(*slots: int, pod: str = "a") -> Record:
    return Record(
        tuple(f"{uuid(0)}-{slot}" for slot in slots), f"uid-{pod}", "default", pod, "main", (uuid(0),), 0.0, 0
    )


def record_of(grants: GrantDirectories, key: str) -> Record:
    found = grants.record(key)
    assert found is not None
    return found


def restarted(root: Path, image: Path | None = None) -> GrantDirectories:
    grants = GrantDirectories(root, image or root / "image.so")
    grants.install()
    return grants

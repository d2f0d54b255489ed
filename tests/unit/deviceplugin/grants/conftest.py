from __future__ import annotations

from pathlib import Path

import pytest

from deviceplugin.grants.grant_directories import GrantDirectories


@pytest.fixture
def grants(tmp_path: Path) -> GrantDirectories:
    (tmp_path / "image.so").write_bytes(b"version 1")
    made = GrantDirectories(tmp_path / "state", tmp_path / "image.so")
    made.install()
    return made

"""The library of the state folder and the preload files, and a link to the library in each grant directory."""

from __future__ import annotations

import hashlib
import os
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Final

from deviceplugin.grants.atomic_file import (
    FileVersion,
    content_of,
    discard_temporary,
    make_folder,
    size_of,
    version_of,
    write_atomically,
)
from vgpu.api.contract import LIBRARY, PRELOAD_TEXTS

_PRELOADS: Final = {name: text.encode() for name, text in PRELOAD_TEXTS.items()}


class Library:
    """Of a node. `source` is the one that this plugin came with."""

    def __init__(self, state_root: Path, source: Path) -> None:
        self._root, self._source = state_root, source
        self.installed = state_root / "lib" / "none" / LIBRARY
        """By its content: a new one never touches an old one in use."""
        self._right: dict[str, FileVersion] = {}
        """Name of a preload file -> its version that was right."""

    def install(self) -> Path:
        """Install the library and the preload files. Returns the library's path. Raises OSError."""
        content = self._source.read_bytes()
        self.installed = self._root / "lib" / hashlib.sha256(content).hexdigest()[:16] / LIBRARY
        for folder in (self._root, self.installed.parent.parent, self.installed.parent):
            make_folder(folder)
        if size_of(self.installed) != len(content):
            write_atomically(self.installed, content, 0o755)
        self.restore_preload()
        for path in (self.installed, *(self._root / name for name in _PRELOADS)):
            discard_temporary(path)
        return self.installed

    def restore_preload(self) -> list[str]:
        """Returns the names of those that were missing or changed. Raises OSError."""
        missing = []
        for name, content in _PRELOADS.items():
            path = f"{self._root}/{name}"
            version = version_of(path)
            if version is not None and version == self._right.get(name):
                continue
            if content_of(path) != content:
                write_atomically(path, content, 0o644)
                missing.append(name)
                version = version_of(path)
            if version is not None:
                self._right[name] = version
        return missing

    def link(self, folder: str) -> None:
        """The installed library, in place of one of an earlier installation. A removed one is installed again. Raises OSError."""
        target = f"{folder}/{LIBRARY}"
        with suppress(FileNotFoundError):
            there = os.stat(self.installed)
            if there.st_size > 0 and os.path.samestat(there, os.stat(target)):
                return
        if size_of(self.installed) == 0:
            make_folder(self.installed.parent.parent)
            make_folder(self.installed.parent)
            write_atomically(self.installed, self._source.read_bytes(), 0o755)
        beside = discard_temporary(target)
        try:
            beside.hardlink_to(self.installed)
        except OSError:
            shutil.copyfile(self.installed, beside)
            beside.chmod(0o755)
        beside.replace(target)

    def collect(self, *, now: float, older_than_s: float) -> None:
        """Remove those of earlier installations: a grant that uses one has its own link."""
        for folder in self.installed.parent.parent.glob("*"):
            if folder != self.installed.parent and now - folder.stat().st_mtime > older_than_s:
                shutil.rmtree(folder, ignore_errors=True)

"""Detects new and removed grant directories, and new grant files in them, by inotify.

An inotify event is only a hint to read the folder again: the folder itself is authoritative. So a lost event costs one rescan
only.
"""

from __future__ import annotations

import ctypes
import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Final

_CREATE, _MOVED_TO, _DELETE, _MOVED_FROM, _CLOSE_WRITE = 0x100, 0x80, 0x200, 0x40, 0x8
_OVERFLOW: Final = 0x4000
_IGNORED: Final = 0x8000
_ONLY_DIRECTORY: Final = 0x01000000
_EVENT = struct.Struct("iIII")
_libc = ctypes.CDLL(None, use_errno=True)


class GrantWatch:
    """One inotify descriptor over the grants folder and each directory in it."""

    def __init__(self, folder: Path) -> None:
        self.fd: int = _libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        if self.fd < 0:
            raise OSError(ctypes.get_errno(), "inotify_init1: cannot watch the grants folder")
        self._names: dict[int, str] = {}
        self._folder = self._add(folder, _CREATE | _MOVED_TO | _DELETE | _MOVED_FROM)

    def follow(self, directory: Path) -> None:
        """Watch grant files in this directory too. A directory that has gone is no error: the rescan detects it."""
        try:
            self._names[self._add(directory, _MOVED_TO | _CLOSE_WRITE | _DELETE)] = directory.name
        except FileNotFoundError:
            return

    def changed(self) -> Iterator[str | None]:
        """Names of directories whose files changed; None = read the whole folder again. Never blocks."""
        try:
            events = os.read(self.fd, 65536)
        except BlockingIOError:
            return
        at = 0
        while at < len(events):
            watch, mask, _, length = _EVENT.unpack_from(events, at)
            at += _EVENT.size + length
            if mask & _OVERFLOW or watch == self._folder:
                yield None
            elif mask & _IGNORED:
                self._names.pop(watch, None)
            elif watch in self._names:
                yield self._names[watch]

    def close(self) -> None:
        """Stop watching."""
        os.close(self.fd)

    def _add(self, path: Path, mask: int) -> int:
        number: int = _libc.inotify_add_watch(self.fd, os.fsencode(path), mask | _ONLY_DIRECTORY)
        if number < 0:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code), str(path))
        return number

"""The names of the grant directories, remembered between two changes of the folder that they lie in.

A start needs them several times, and a node may have hundreds. The folder's time of change shows whether a process made, renamed or removed
one since. That time is as coarse as the kernel's tick (some milliseconds): `scan` reads in any case, and upkeep calls it.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

LEFTOVER: Final = "."
"""Names of directories that are not complete begin so. The arbiter passes over them."""
ALIKE: Final = 16
"""Characters of a beginning that is searched for: the hash of the device IDs (`allocation_record`)."""


class Listing:
    """Of one folder, which need not be there."""

    def __init__(self, folder: Path) -> None:
        self._folder = str(folder)
        self._names: frozenset[str] = frozenset()
        self._alike: dict[str, list[str]] = {}
        """Beginning -> the names that have it."""
        self._changed_ns = -1

    def scan(self) -> frozenset[str]:
        """The names on the disk now. Raises OSError."""
        found: list[str] = []
        changed_ns = self._time_ns()  # before: what is made meanwhile is found at the next scan
        with suppress(FileNotFoundError), os.scandir(self._folder) as entries:
            found += [entry.name for entry in entries if entry.name[:1] != LEFTOVER and entry.is_dir()]
        alike: dict[str, list[str]] = {}
        for name in found:
            alike.setdefault(name[:ALIKE], []).append(name)
        self._names, self._alike, self._changed_ns = frozenset(found), alike, changed_ns
        return self._names

    def names(self) -> frozenset[str]:
        """As `scan`; the disk is read only when the folder has changed. Raises OSError."""
        return self._names if self._time_ns() == self._changed_ns else self.scan()

    def alike(self, name: str) -> Collection[str]:
        """Of `names`, those that begin as this one does. Raises OSError."""
        self.names()
        return tuple(self._alike.get(name[:ALIKE], ()))

    def added(self, name: str) -> None:
        """This name was made after the last call of `names`, and is all that changed."""
        if name not in self._names:
            self._names |= {name}
            self._alike.setdefault(name[:ALIKE], []).append(name)
        self._changed_ns = self._time_ns()

    @contextmanager
    def passing_over(self) -> Iterator[None]:
        """Meanwhile the caller makes names that begin with `LEFTOVER`, and no other code makes any: no reason to read again."""
        before_ns = self._time_ns()
        yield
        if before_ns == self._changed_ns:
            self._changed_ns = self._time_ns()

    def _time_ns(self) -> int:
        try:
            return os.stat(self._folder).st_mtime_ns
        except FileNotFoundError:
            return -1

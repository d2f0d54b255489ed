"""Grant directories that are ready before they are needed: the library, the folders of the socket, the link to it, and empty files
in which the record and the grant are begun.

Making these takes longer than all else that Allocate does, and it is the same for each container. A spare has no name that another process knows, no
record and no grant; it becomes a directory of one allocation and is never a spare again. Without one, Allocate makes all of it.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Final

from deviceplugin.grants.atomic_file import make_folder

KEPT: Final = 4
"""Guessed: a pod has few containers with a share, and one is made within a millisecond."""
PREFIX: Final = "spare-"


class Spares:
    """In `folder`, under names that begin with `hidden`. `complete` makes a folder what a spare is. Raises what that raises."""

    def __init__(self, folder: Path, hidden: str, complete: Callable[[str], None]) -> None:
        self._folder, self._prefix, self._complete = folder, f"{hidden}{PREFIX}", complete
        self._ready: list[Path] = []
        self._making: set[str] = set()
        self._taken: set[str] = set()
        self._lock = threading.Lock()

    @property
    def names(self) -> Collection[str]:
        """Of folders that are spares, will be, or were taken and are not done with."""
        with self._lock:
            return {*self._making, *self._taken, *(path.name for path in self._ready)}

    def take(self) -> Path | None:
        """One that is the caller's until it is `done` with it; None when there is none. A part of it, or all, may have been removed."""
        with self._lock:
            if not self._ready:
                return None
            path = self._ready.pop()
            self._taken.add(path.name)
            return path

    def done(self, path: Path) -> None:
        """It has another name now; else it is a leftover."""
        with self._lock:
            self._taken.discard(path.name)

    def fill(self) -> None:
        """Make as many as are kept. Raises OSError."""
        while True:
            path = self._folder / f"{self._prefix}{secrets.token_hex(8)}"
            with self._lock:
                if len(self._ready) + len(self._making) >= KEPT:
                    return
                self._making.add(path.name)
            try:
                make_folder(path)
                self._complete(str(path))
                with self._lock:
                    self._ready.append(path)
            finally:
                with self._lock:
                    self._making.discard(path.name)

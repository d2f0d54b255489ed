"""The highest limit that was set for each container on each GPU, stored across restarts of the arbiter. In a file beside its status socket.

What a container leased under a higher limit it may keep when the limit is lowered, or bursts are switched off for the node: it is not over its limit for that.
Only root can write the file, so no process raises its limit by what it states. If the file is missing or damaged, the limits of now count alone. Grant
directories are never used again, so a name stays right as long as its directory is there.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from math import inf
from pathlib import Path
from typing import Final

import msgspec

from arbiter.stored_file import StoredFile

FILE: Final = "limits.json"
AGAIN_S: Final = 5.0
"""After the file could not be written, as on a disk that is full for a while. Guessed."""


class _File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    containers: Mapping[str, Mapping[str, int]]
    """Grant directory -> GPU -> bytes."""
    version: int = 1


class HighestLimits:
    """See the module. For one thread. `path` None = nothing is stored. `grants`: the folder of the grant directories."""

    def __init__(
        self, path: Path | None = None, grants: Path | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._grants, self._clock = grants, clock
        self._file = StoredFile(
            path,
            _File,
            unread="earlier limits of containers are not known",
            unwritten="limits of containers are forgotten at a restart",
        )
        self._again_at_s = inf
        self._highest = self._read()

    def of(self, name: str, gpu: str) -> int:
        """Bytes; 0 = none was set above the guarantee."""
        return self._highest.get(name, {}).get(gpu, 0)

    def set(self, name: str, gpu: str, limit_bytes: int) -> None:
        """A limit above the guarantee is set. Called again while it is, which writes the file again where it could not be written."""
        if limit_bytes > self.of(name, gpu):
            self._highest.setdefault(name, {})[gpu] = limit_bytes
            self._save()
        elif self._clock() >= self._again_at_s:
            self._save()

    def forget(self, name: str) -> None:
        """The directory is another container's now."""
        if self._highest.pop(name, None) is not None:
            self._save()

    def _read(self) -> dict[str, dict[str, int]]:
        found = self._file.read()
        if found is None:
            return {}
        return {name: dict(gpus) for name, gpus in found.containers.items()}

    def _save(self) -> None:
        """Without the containers that are gone."""
        if self._grants is None:
            return
        self._highest = {name: gpus for name, gpus in self._highest.items() if (self._grants / name).is_dir()}
        self._again_at_s = inf if self._file.write(_File(self._highest)) else self._clock() + AGAIN_S

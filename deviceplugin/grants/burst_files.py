"""The file `burst` in the grant directory of a container that may use more than its guarantee. Its content is `vgpu.api.burst`'s.

A kill of the plugin or a loss of power leaves the old file, the new one, or none: then the container has its guarantee until the file is
written again, at its next start or at the plugin's.
"""

from __future__ import annotations

from pathlib import Path

from deviceplugin.grants.atomic_file import content_of, write_atomically
from deviceplugin.grants.grant_directories import GrantDirectories
from vgpu.api.burst import BurstLimits, burst_to_text
from vgpu.api.contract import BURST


class BurstFiles:
    """Those of a node's grant directories."""

    def __init__(self, grants: GrantDirectories) -> None:
        self._grants = grants

    def write(self, key: str, limits: BurstLimits | None, *, running: bool = False) -> bool:
        """The limits of one allocation, None where it has its guarantee alone. Returns whether that is new. Raises OSError.

        `running`: the event loop writes, for a container that runs, and may do so while a thread writes for one that starts.
        """
        folder = self._grants.folder(key)
        path, content = f"{folder}/{BURST}", burst_to_text(limits).encode() if limits else None
        if content_of(path) == content:
            return False
        if content is not None:
            write_atomically(path, content, 0o444, temporary=f"{folder}/.{BURST}.edited" if running else None)
            return True
        Path(path).unlink(missing_ok=True)
        return True

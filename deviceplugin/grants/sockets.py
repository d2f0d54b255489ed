"""Where the arbiter's sockets lie, and how containers reach them.

    sockets/<key>/arbiter.sock      made by the arbiter: the one folder below the state folder that containers see and it may write
    grants/<key>/socket/            empty here; in the container sockets/<key> is mounted over it
    grants/<key>/arbiter.sock       a link to socket/arbiter.sock, for the library
    grants/.spare-<number>/.socket  sockets/<key> of the next allocation, made before it has a key and moved then

So the arbiter may write no directory with the library, the grant or the name of either. A directory that an earlier plugin made
has no `socket`, and its container, which may be restarted with the mounts that it got then, finds the arbiter's socket in the grant directory
itself: there the plugin puts a hard link to it, anew whenever the arbiter made another one.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import stat
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Final

import structlog

from deviceplugin.grants.atomic_file import discard_temporary, make_folder
from vgpu.api.contract import SOCKET, SOCKET_DIR

CHECK_S: Final = 0.25
"""Between checks for a new socket of the arbiter, while there are directories of an earlier plugin: two calls for each. Guessed: a process
that starts meanwhile waits, for 30 s and more."""
TARGET: Final = f"{SOCKET_DIR}/{SOCKET}"
SPARE: Final = f".{SOCKET_DIR}"
"""In a spare: the folder that will be mounted over its `socket`."""

log = structlog.get_logger("deviceplugin.grants.sockets")


class Sockets:
    """Of a node. `earlier` answers the keys of directories that an earlier plugin made."""

    def __init__(self, state_root: Path, earlier: Callable[[], Iterable[str]]) -> None:
        self._root, self._grants, self._earlier = state_root / "sockets", state_root / "grants", earlier
        self._failed: dict[str, str] = {}

    def path(self, key: str) -> Path:
        """Where the arbiter listens for this allocation."""
        return self._root / key / SOCKET

    def make(self, key: str, spare: str = "") -> bool:
        """The folder that is mounted, of what is a `spare` grant directory if that has one. Returns whether it is new. Raises OSError,
        also when it is anything but a folder: the arbiter may write beside it, and what is named here gets into a container."""
        folder = f"{self._root}/{key}"
        if spare:
            with suppress(OSError):  # there is none, or it is no folder
                os.rename(f"{spare}/{SPARE}", folder)
        try:
            mode = os.lstat(folder).st_mode
        except FileNotFoundError:
            make_folder(folder)
            return True
        if not stat.S_ISDIR(mode):
            raise NotADirectoryError(
                f"{folder} is of mode {mode:o}: it must be a directory, for it is mounted into a container"
            )
        return False

    def furnish(self, folder: str) -> bool:
        """What a grant directory needs so that its container finds the socket. Returns whether it was missing. Raises OSError."""
        link = f"{folder}/{SOCKET}"
        try:
            right = os.readlink(link) == TARGET
        except OSError:
            right = False
        new = make_folder(f"{folder}/{SOCKET_DIR}")
        if not right:  # or an arbiter of an earlier version put its own socket there
            beside = discard_temporary(link)
            beside.symlink_to(TARGET)
            beside.replace(link)
        return new or not right

    def remove(self, key: str) -> None:
        """An allocation that no container has any longer."""
        shutil.rmtree(self._root / key, ignore_errors=True)

    def collect(self, keys: Callable[[], Collection[str]]) -> None:
        """Remove all but these: a plugin that was killed had begun them, or an earlier one removed the rest. `keys` is called after a read of
        what is there, since others may be made meanwhile."""
        with suppress(FileNotFoundError):
            there = os.listdir(self._root)
            kept = keys()
            for name in there:
                if name not in kept:
                    self.remove(name)

    def link_earlier(self) -> bool:
        """Put the arbiter's sockets into directories that an earlier plugin made. Returns whether there are any."""
        any_there = False
        for key in self._earlier():
            any_there = True
            try:
                self._link(key)
                self._failed.pop(key, None)
            except OSError as error:
                if self._failed.get(key) != str(error):
                    self._failed[key] = str(error)
                    log.error(
                        "the arbiter's socket cannot be put where an older container expects it",
                        key=key,
                        error=str(error),
                    )
        return any_there

    async def run(self) -> None:
        """Until the last directory of an earlier plugin is gone, or cancelled."""
        while self.link_earlier():  # noqa: ASYNC110 (another process makes them)
            await asyncio.sleep(CHECK_S)

    def _link(self, key: str) -> None:
        source, link = self.path(key), self._grants / key / SOCKET
        try:
            made = source.lstat()
        except FileNotFoundError:
            return  # the arbiter has not made it yet
        with suppress(FileNotFoundError):
            if os.path.samestat(made, link.lstat()):
                return
        beside = discard_temporary(link)
        os.link(source, beside, follow_symlinks=False)
        if not stat.S_ISSOCK(beside.lstat().st_mode):
            beside.unlink()
            raise OSError(f"{source} is no socket: the arbiter puts sockets there")
        beside.replace(link)

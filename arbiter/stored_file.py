"""A small JSON file that an arbiter leaves for the next one. It is replaced as a whole, so a reader finds the old content or the new."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Final, Generic, TypeVar

import msgspec
import structlog

LONGEST_BYTES: Final = 16 * 2**20
"""Of what is read. A container with one GPU needs some 120, a process some 20."""

T = TypeVar("T", bound=msgspec.Struct)

_log = structlog.get_logger()


VERSION: Final = 1
"""Of the content of every such file."""


class _Version(msgspec.Struct, frozen=True):
    """What a file of each version has."""

    version: int = VERSION


class StoredFile(Generic[T]):
    """See the module. `path` None: nothing is stored. `unread` and `unwritten`: what a failure means, for the log."""

    def __init__(self, path: Path | None, content: type[T], *, unread: str, unwritten: str) -> None:
        self._path, self._content, self._unread, self._unwritten = path, content, unread, unwritten
        self._failed = ""

    def read(self) -> T | None:
        """None: there is none, it is damaged, or its content is of another version."""
        if self._path is None:
            return None
        try:
            with self._path.open("rb") as file:
                content = file.read(LONGEST_BYTES)
            found = msgspec.json.decode(content, type=_Version).version
            if found != VERSION:
                raise msgspec.ValidationError(
                    f"its content is of version {found}: this program reads version {VERSION}"
                )
            return msgspec.json.decode(content, type=self._content)
        except FileNotFoundError:
            return None
        except (OSError, msgspec.MsgspecError, UnicodeError, RecursionError) as error:
            _log.warning(self._unread, file=str(self._path), reason=str(error)[:200])
            return None

    def write(self, content: T) -> bool:
        """False: the file is as before. The same failure is logged once."""
        if self._path is None:
            return True
        beside = self._path.with_name(f".{self._path.name}.new")
        try:
            beside.write_bytes(msgspec.json.encode(content))
            beside.replace(self._path)
        except OSError as error:
            if str(error) != self._failed:
                _log.error(self._unwritten, file=str(self._path), reason=str(error))
            self._failed = str(error)
            with suppress(OSError):
                beside.unlink(missing_ok=True)
            return False
        self._failed = ""
        return True

    def remove(self) -> None:
        """What it has is wrong now."""
        if self._path is not None:
            with suppress(OSError):
                self._path.unlink(missing_ok=True)

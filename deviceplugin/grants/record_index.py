"""The records of allocations and the grants, as they were read or written last: found by device IDs and by pod, without a walk.

A start of a container needs those of a few directories, and a node may have hundreds. A file is read again only when
its version differs (`atomic_file.FileVersion`). Written in several threads: a content and its version are one entry, and the indices have a lock.
"""

from __future__ import annotations

from collections.abc import Collection, KeysView, Mapping
from threading import Lock
from typing import Generic, TypeVar

from deviceplugin.grants.allocation_record import Record
from deviceplugin.grants.atomic_file import FileVersion
from deviceplugin.grants.listing import ALIKE

T = TypeVar("T")


class FileContents(Generic[T]):
    """Key of a directory -> the last content of one file in it."""

    def __init__(self) -> None:
        self._contents: dict[str, tuple[T, FileVersion | None]] = {}

    def put(self, key: str, content: T, version: FileVersion | None) -> None:
        """This was read or written, and is in that version of the file; None = unknown which."""
        self._contents[key] = content, version

    def get(self, key: str, version: FileVersion) -> T | None:
        """The content of this version of the file, if it is the one that was read or written."""
        content, known = self._contents.get(key, (None, None))
        return content if known == version else None

    def last(self, key: str) -> T | None:
        """The file's last content, also when it is gone since."""
        return self._contents.get(key, (None, None))[0]

    def keys(self) -> KeysView[str]:
        """Of all that is known."""
        return self._contents.keys()

    def all(self) -> dict[str, T]:
        """The same of all files, by key."""
        return {key: content for key, (content, _) in list(self._contents.items())}

    def forget(self, key: str) -> None:
        """The directory is gone."""
        self._contents.pop(key, None)


class RecordIndex(FileContents[Record]):
    """The records."""

    def __init__(self) -> None:
        super().__init__()
        self._alike: dict[str, set[str]] = {}
        """What names of directories of the same IDs begin with -> keys."""
        self._of_pods: dict[str, set[str]] = {}
        """Pod UID -> keys."""
        self._lock = Lock()

    def put(self, key: str, content: Record, version: FileVersion | None) -> None:
        with self._lock:
            before = self.last(key)
            if before is not None and before.uid != content.uid:
                _take_out(self._of_pods, before.uid, key)
            super().put(key, content, version)
            self._alike.setdefault(key[:ALIKE], set()).add(key)
            self._of_pods.setdefault(content.uid, set()).add(key)

    def forget(self, key: str) -> None:
        with self._lock:
            before = self.last(key)
            if before is not None:
                _take_out(self._alike, key[:ALIKE], key)
                _take_out(self._of_pods, before.uid, key)
            super().forget(key)

    def alike(self, begin: str) -> Collection[str]:
        """Keys that begin with this hash of device IDs."""
        with self._lock:
            return tuple(self._alike.get(begin, ()))

    def of_pods(self, uids: Collection[str]) -> Mapping[str, Record]:
        """Key -> record of each allocation that these pods have, by the records."""
        with self._lock:
            return {key: self._contents[key][0] for uid in uids for key in self._of_pods.get(uid, ())}


def _take_out(index: dict[str, set[str]], name: str, key: str) -> None:
    index[name].discard(key)
    if not index[name]:
        del index[name]

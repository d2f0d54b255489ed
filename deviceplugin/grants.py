"""The state folder: the library, and one folder for each allocation of a share.

    lib/<sha256>/libtangram.so    the library by its content: a new one never touches an old one in use
    ld.so.preload                 what containers find as /etc/ld.so.preload
    grants/<key>/                 mounted into the container as /run/tangram
        libtangram.so             hard link to the library as it was at allocation
        arbiter.sock              made by the arbiter
        grant                     what the container is held to; written before each start
        allocation.json           our own book, so that a restart of the plugin loses nothing

Knows files. Who gets what was decided elsewhere.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final

import msgspec
import structlog

from deviceplugin.files import content_of, discard_leftover, make_folder, size_of, write_whole
from vgpu.codec import grant_from_text, grant_to_text
from vgpu.contract import GRANT, LIBRARY, PRELOAD_TEXT, SOCKET, grant_key
from vgpu.errors import BadDocument, NewerVersion
from vgpu.grant import Grant

RECORD: Final = "allocation.json"

log = structlog.get_logger("deviceplugin.grants")


VERSION: Final = 1
"""Of our own book. One of a later version was written by a later plugin, which may have counted otherwise."""


class Record(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Our own book about one allocation of gpu-mem. The pod is our guess until PreStart."""

    ids: tuple[str, ...]
    uid: str
    namespace: str
    pod: str
    container: str
    cards: tuple[str, ...]
    """UUIDs whose devices the container was given by Allocate."""
    at: float
    """Unix time."""
    v: int = VERSION

    @property
    def key(self) -> str:
        """Name of the folder."""
        return grant_key(self.ids)


class _Version(msgspec.Struct):
    v: int


_records = msgspec.json.Decoder(Record)
_versions = msgspec.json.Decoder(_Version)


def read_record(path: Path) -> Record | None:
    """Our book about one allocation; None when there is none. Raises BadDocument that names file, value and range; OSError."""
    content = content_of(path)
    if content is None:
        return None
    try:
        version = _versions.decode(content).v
        if not 1 <= version <= VERSION:
            newer = NewerVersion if version > VERSION else BadDocument
            raise newer(f"{path} is of version {version}: this device plugin reads versions 1 to {VERSION}")
        record = _records.decode(content)
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise BadDocument(f"{path} has {len(content)} bytes that are no allocation: {str(error)[:300]}") from None
    if record.key != path.parent.name:
        raise BadDocument(
            f"{path} is about the devices of folder {record.key}: it must be about those of {path.parent.name}"
        )
    return record


class Grants:
    """The state folder of a node."""

    def __init__(self, state_root: Path, library: Path) -> None:
        self._root, self._source = state_root, library
        self._installed = state_root / "lib" / "none" / LIBRARY
        self._damaged: dict[str, str] = {}
        """Key -> what is wrong with its book, as it was told."""
        self._owners: dict[str, str] = {}
        """Key -> UID of the pod that its book names, of the books read or written so far."""

    def folder(self, key: str) -> Path:
        """Of one allocation."""
        return self._root / "grants" / key

    def install(self) -> Path:
        """Put the library and the preload file in place. Answers the library's path. Raises OSError."""
        content = self._source.read_bytes()
        self._installed = self._root / "lib" / hashlib.sha256(content).hexdigest()[:16] / LIBRARY
        for folder in (self._root, self._root / "lib", self._installed.parent, self._root / "grants"):
            make_folder(folder)
        if not self._installed.exists() or self._installed.stat().st_size != len(content):
            write_whole(self._installed, content, 0o755)
        self._restore_preload()
        for path in (self._installed, self._root / "ld.so.preload"):
            discard_leftover(path)
        return self._installed

    def prepare(self, record: Record) -> str:
        """A folder for a new allocation: it has the library and no grant yet. Answers its key. Raises OSError."""
        key = record.key
        folder = self.folder(key)
        if not make_folder(folder):
            # What a former allocation left. Also: ext4 writes a file out at once that is renamed onto another, and 5 ms of
            # waiting for the disk is more than the rest of an admission.
            (folder / GRANT).unlink(missing_ok=True)
            (folder / RECORD).unlink(missing_ok=True)
        self._link_library(folder)
        self.update(record)
        return key

    def restore(self, key: str) -> list[str]:
        """Put back what is missing of what a container mounts. Answers what was. Raises OSError."""
        folder, missing = self.folder(key), list[str]()
        if self._restore_preload():
            missing.append("ld.so.preload")
        if make_folder(folder):
            missing.append(str(folder))
        if size_of(folder / LIBRARY) == 0:
            missing.append(LIBRARY)
            self._link_library(folder)
        return missing

    def write(self, key: str, grant: Grant) -> None:
        """The grant, for the library and the arbiter. Raises OSError."""
        path, content = self.folder(key) / GRANT, grant_to_text(grant).encode()
        if content_of(path) != content:
            write_whole(path, content, 0o444)

    def read(self, key: str) -> Grant | None:
        """The grant as it stands, None when there is none that can be read."""
        try:
            return grant_from_text((self.folder(key) / GRANT).read_text())
        except (OSError, UnicodeError, BadDocument):
            return None

    def socket(self, key: str) -> Path:
        """Where the arbiter listens."""
        return self.folder(key) / SOCKET

    def record(self, key: str) -> Record | None:
        """Our book about one allocation, None when there is none that can be read. Why it cannot is told once."""
        try:
            record = read_record(self.folder(key) / RECORD)
        except (OSError, BadDocument) as error:
            if self._damaged.get(key) != str(error):
                self._damaged[key] = str(error)
                log.error("an allocation's book cannot be read: its folder is kept", key=key, error=str(error))
            return None
        self._damaged.pop(key, None)
        return record

    def damaged(self, key: str) -> bool:
        """Is there a book about this allocation that cannot be read? Then nobody knows whose it is, and it is not freed."""
        self.record(key)
        return key in self._damaged

    def update(self, record: Record) -> None:
        """Write our book about an allocation. Raises OSError."""
        write_whole(self.folder(record.key) / RECORD, msgspec.json.encode(record), 0o600)
        self._owners[record.key] = record.uid

    def keys(self) -> Iterator[str]:
        """Every allocation that has a folder."""
        with suppress(FileNotFoundError):
            yield from sorted(entry.name for entry in (self._root / "grants").iterdir() if entry.is_dir())

    def owners(self) -> Mapping[str, str]:
        """Key -> UID of the pod that our book says has this allocation. A book that was read once is not read again; one that
        could not be is tried at each call."""
        unsettled = (key for key in self.keys() if key not in self._owners)
        self._owners |= {key: record.uid for key in unsettled if (record := self.record(key))}
        return self._owners

    def of_pods(self, uids: Collection[str]) -> list[tuple[str, str]]:
        """(key, UID) of the allocations that our books say these pods have."""
        return [(key, uid) for key, uid in self.owners().items() if uid in uids]

    def age_s(self, key: str, now: float) -> float:
        """Since the folder last changed."""
        try:
            return now - self.folder(key).stat().st_mtime
        except FileNotFoundError:
            return 0.0

    def remove(self, key: str) -> None:
        """An allocation that no container has any longer."""
        folder = self.folder(key)
        self._damaged.pop(key, None)
        self._owners.pop(key, None)
        for name in (GRANT, RECORD):
            (folder / name).unlink(missing_ok=True)
        shutil.rmtree(folder, ignore_errors=True)

    def collect(
        self,
        kept: Collection[str],
        *,
        now: float,
        older_than_s: float,
        ended: Collection[str] = (),
        ended_older_than_s: float = 0.0,
    ) -> list[str]:
        """Remove the folders that are not in `kept` and untouched for so long, with a book that can be read. Answers their keys.

        `ended` are those whose pod is known to have ended. Libraries of earlier installations go too: who has one has a link of his own.
        """
        patience_s = dict.fromkeys(ended, ended_older_than_s)
        unkept = (key for key in self.keys() if key not in kept)
        old = [key for key in unkept if self.age_s(key, now) > patience_s.get(key, older_than_s)]
        gone = [key for key in old if not self.damaged(key)]
        for key in gone:
            self.remove(key)
        for folder in self._installed.parent.parent.glob("*"):
            if folder != self._installed.parent and now - folder.stat().st_mtime > older_than_s:
                shutil.rmtree(folder, ignore_errors=True)
        return gone

    def _restore_preload(self) -> bool:
        path, text = self._root / "ld.so.preload", PRELOAD_TEXT.encode()
        if content_of(path) == text:
            return False
        write_whole(path, text, 0o644)
        return True

    def _link_library(self, folder: Path) -> None:
        """The installed library, in place of one of an earlier installation."""
        target = folder / LIBRARY
        with suppress(FileNotFoundError):
            if target.samefile(self._installed):
                return
        beside = discard_leftover(target)
        try:
            beside.hardlink_to(self._installed)
        except OSError:
            shutil.copyfile(self._installed, beside)
            beside.chmod(0o755)
        beside.replace(target)

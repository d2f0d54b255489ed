"""The state folder: the library, and one directory for each allocation of a share.

    lib/<sha256>/libtangram.so    the library by its content: a new one never touches an old one in use
    preload                       what containers find as /etc/ld.so.preload
    ld.so.preload                 the same for containers of the release before, which have the library at another path
    sockets/<key>/                mounted into the container as /.tangram/socket; the arbiter makes its socket there
    grants/.spare-<number>/       a directory for the next allocation (`spares`)
    grants/<key>/                 mounted into the container as /.tangram; made for one Allocate, never used again (`allocation_record`)
        libtangram.so             hard link to the library as it was at allocation
        socket/, arbiter.sock     the way to the arbiter (`sockets`)
        grant                     the container's limits; written before each start
        burst                     limits above them, of a container that has any (`burst_files`)
        container                 the runtime's ID of the container, soon after each start (`container_ids`)
        allocation.json           the allocation record, so that a restart of the plugin loses nothing

All of it but sockets/ belongs to the plugin alone: the arbiter may read the grants. A directory appears under its name with its record in it: a plugin that is killed before leaves one whose name begins with a dot.
Works on files alone. Other modules decide which pod gets what.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec
import structlog

from deviceplugin.calls_in_progress import without_waiting
from deviceplugin.grants import checked_file as sealed
from deviceplugin.grants.allocation_record import RECORD, Record, hash_of, new_suffix, of_ids, order_of, read_record
from deviceplugin.grants.atomic_file import (
    content_of,
    create_temporary,
    make_folder,
    size_of,
    sync,
    temporary_path,
    version_of,
    write_atomically,
)
from deviceplugin.grants.disk_thread import DiskThread
from deviceplugin.grants.durability import Durability
from deviceplugin.grants.library import Library
from deviceplugin.grants.listing import LEFTOVER, Listing
from deviceplugin.grants.record_index import FileContents, RecordIndex
from deviceplugin.grants.sockets import SPARE, Sockets
from deviceplugin.grants.spares import Spares
from vgpu.api.codec import grant_from_text, grant_to_text
from vgpu.api.contract import CONTAINER_ID, GRANT, LIBRARY, SOCKET, SOCKET_DIR
from vgpu.api.errors import BadDocument, NewerVersion
from vgpu.api.grant import Grant

log = structlog.get_logger("deviceplugin.grants.grant_directories")


@dataclass(frozen=True, slots=True)
class GrantDirectory:
    """A grant directory, as disk and memory know it."""

    key: str
    record: Record | None
    """None: there is no record that can be read."""
    grant: Grant | None = None
    """What was written here last; None when there is none that can be read."""
    trouble: str = ""
    """Why there is no record."""
    later: bool = False
    """A later plugin wrote the record: it is left as it is."""
    remembered: bool = False
    """The record is missing on the disk, and is answered from memory."""


class GrantDirectories:
    """The state folder of a node. `until_idle` as `calls_in_progress.CallsInProgress.until_idle`."""

    def __init__(
        self,
        state_root: Path,
        library: Path,
        boot: str | None = None,
        until_idle: Callable[[], Awaitable[None]] = without_waiting,
    ) -> None:
        self.boot = sealed.boot_id() if boot is None else boot
        self._root, self._grants = state_root, f"{state_root}/grants"
        self._library = Library(state_root, library)
        self._damaged: dict[str, str] = {}
        """Key -> what is wrong with its record, as it was logged."""
        self._later: set[str] = set()
        """Those of them that a later plugin wrote."""
        self._making: set[str] = set()
        """Keys of directories that a thread is making."""
        self.disk_thread = DiskThread("grants")
        """Makes directories for Allocate and writes grants at a start, one after another."""
        self.durability = Durability(self.sync_to_disk, self.fill_spares, until_idle=until_idle)
        self._listing = Listing(state_root / "grants")
        self.sockets = Sockets(state_root, self.earlier)
        self.spares = Spares(state_root / "grants", LEFTOVER, self._make_spare)
        self._known = RecordIndex()
        """Of the directories whose record was read or written so far."""
        self._granted: FileContents[Grant] = FileContents()
        """Their grants, likewise."""

    def folder(self, key: str) -> Path:
        """Of one allocation."""
        return self._root / "grants" / key

    def _in(self, key: str, name: str) -> str:
        """A file of one allocation."""
        return f"{self._grants}/{key}/{name}"

    def install(self) -> Path:
        """Install the library and the preload files. Returns the library's path. Raises OSError."""
        installed = self._library.install()
        for name in ("grants", "sockets"):
            make_folder(self._root / name)
        self._discard_leftovers()
        for key in self.keys():
            if not self._of_earlier(key):
                self.sockets.furnish(f"{self._grants}/{key}")
        self.spares.fill()
        return installed

    def earlier(self) -> Iterator[str]:
        """Keys of directories that a plugin made which put the arbiter's socket into them."""
        return filter(self._of_earlier, self._listing.names())

    def _of_earlier(self, key: str) -> bool:
        return not os.path.exists(self._in(key, SOCKET_DIR))

    def prepare(self, record: Record) -> str:
        """A directory for a new allocation: it has the library and no grant yet. Returns its key. Raises OSError.

        A kill loses nothing of it. A loss of power may, until `sync_to_disk` has returned.
        """
        newest = max(map(order_of, self.keys_of(record.ids)), default=0)
        record = msgspec.structs.replace(record, suffix=new_suffix(newest + 1), boot=self.boot)
        key = record.key
        spare = self.spares.take() or self._root / "grants" / f"{LEFTOVER}{key}"
        beside = str(spare)
        self._making.add(key)
        try:
            make_folder(beside)
            self._complete(beside)  # also a spare: an earlier library may be in it, or a part missing
            self.sockets.make(key, beside)  # the kubelet mounts it too
            sealed.write(f"{beside}/{RECORD}", record, durable=False)
            os.rename(beside, f"{self._grants}/{key}")
            self._listing.added(key)
            self._known.put(key, record, version_of(self._in(key, RECORD)))
        finally:
            self._making.discard(key)
            self.spares.done(spare)
        return key

    def _complete(self, folder: str) -> None:
        """What is the same in each directory. Raises OSError."""
        self._library.link(folder)
        self.sockets.furnish(folder)

    def _make_spare(self, folder: str) -> None:
        """What else takes long to make. Raises OSError."""
        self._complete(folder)
        make_folder(f"{folder}/{SPARE}")
        for name in (RECORD, GRANT):
            create_temporary(temporary_path(f"{folder}/{name}"))

    def fill_spares(self) -> None:
        """The next Allocate finds a spare. One that cannot be made now may be later, and Allocate reports why it cannot."""
        with suppress(OSError), self._listing.passing_over():
            self.spares.fill()

    def sync_to_disk(self, key: str) -> None:
        """Return when the directory and its record outlive a loss of power. Waits for the disk. Raises OSError."""
        folder = self.folder(key)
        for path in (folder / RECORD, folder, folder.parent):  # the first waits, and takes the others with it
            sync(path)

    def restore(self, key: str) -> list[str]:
        """Put back what is missing of what a container mounts. Returns what was. Raises OSError."""
        folder, missing = f"{self._grants}/{key}", self._library.restore_preload()
        if make_folder(folder):
            missing.append(folder)
        if size_of(f"{folder}/{LIBRARY}") == 0:
            missing.append(LIBRARY)
            self._library.link(folder)
        if self.sockets.make(key):
            missing.append(str(self.sockets.path(key).parent))
        if folder in missing or not self._of_earlier(key):
            missing += [SOCKET] * self.sockets.furnish(folder)
        else:
            self.sockets.link_earlier()
        return missing

    def write(self, key: str, grant: Grant) -> None:
        """The grant, for the library and the arbiter. Raises OSError."""
        path, content = self._in(key, GRANT), grant_to_text(grant).encode()
        if content_of(path) != content:
            write_atomically(path, content, 0o444)
        self._granted.put(key, grant, version_of(path))

    def identify(self, key: str, container_id: str) -> bool:
        """Write whose container the directory is, for the arbiter. Returns whether that is new. Raises OSError."""
        path, content = self._in(key, CONTAINER_ID), f"{container_id}\n".encode()
        if content_of(path) == content:
            return False
        write_atomically(path, content, 0o444)
        return True

    def put_back(self) -> list[str]:
        """Records and grants that were removed from directories that still exist. Returns their paths. Raises OSError.

        Without its grant, each new process of a container that runs is refused its memory, for as long as the container lives.
        """
        back = list[str]()
        for key, grant in self._granted.all().items():
            if not self.granted(key) and os.path.isdir(f"{self._grants}/{key}"):
                self.write(key, grant)
                back.append(self._in(key, GRANT))
        for key, record in self._known.all().items():
            if not os.path.exists(self._in(key, RECORD)) and os.path.isdir(f"{self._grants}/{key}"):
                self.update(record)
                back.append(self._in(key, RECORD))
        return back

    def read(self, key: str) -> Grant | None:
        """The grant as it stands, None when there is none that can be read."""
        path = self._in(key, GRANT)
        try:
            version = version_of(path)
            if version is None:
                return None
            known = self._granted.get(key, version)
            if known is None:
                known = grant_from_text(Path(path).read_text())
                self._granted.put(key, known, version)
        except (OSError, UnicodeError, BadDocument):
            return None
        return known

    def granted(self, key: str) -> bool:
        """Was a grant written here?"""
        return os.path.exists(self._in(key, GRANT))

    def socket(self, key: str) -> Path:
        """Where the arbiter listens."""
        return self.sockets.path(key)

    def record(self, key: str) -> Record | None:
        """The record of one allocation, None when there is none that can be read. Why it cannot is logged once."""
        path = self._in(key, RECORD)
        try:
            version = version_of(path)
            if version is not None and (known := self._known.get(key, version)) is not None:
                return known
            record = read_record(Path(path))
            if record is not None:
                self._known.put(key, record, version)
        except (OSError, BadDocument) as error:
            if self._damaged.get(key) != str(error):
                self._damaged[key] = str(error)
                log.error("an allocation's record cannot be read: its folder is kept", key=key, error=str(error))
            (self._later.add if isinstance(error, NewerVersion) else self._later.discard)(key)
            return None
        self._damaged.pop(key, None)
        return record

    def damaged(self, key: str) -> bool:
        """Is there a record of this allocation that cannot be read? Then its pod is unknown, and it is not freed."""
        self.record(key)
        return key in self._damaged

    @property
    def damaged_count(self) -> int:
        """Records that cannot be read, of those that were read."""
        return len(self._damaged)

    def update(self, record: Record) -> None:
        """Write the record of an allocation. Raises OSError."""
        path = self._in(record.key, RECORD)
        sealed.write(path, record, durable=True)
        self._known.put(record.key, record, version_of(path))
        self._damaged.pop(record.key, None)
        self._later.discard(record.key)

    def keys(self) -> Iterator[str]:
        """Every allocation that has a directory."""
        yield from sorted(self._listing.scan())

    def of_ids(self, ids: Collection[str]) -> list[GrantDirectory]:
        """The directories of exactly these IDs, the newest first; also one that was removed from the disk, if it is remembered."""
        return list(self.newest(ids))

    def newest(self, ids: Collection[str]) -> Iterator[GrantDirectory]:
        """As `of_ids`. Each is read when it is reached: a container needs the first or two, and hundreds may be behind them."""
        return map(self.directory, sorted(self.keys_of(ids), key=order_of, reverse=True))

    def keys_of(self, ids: Collection[str]) -> set[str]:
        """Names of the directories of exactly these IDs."""
        alike = hash_of(ids)
        return set(of_ids({*self._listing.alike(alike), *self._known.alike(alike)}, ids))

    def directory(self, key: str) -> GrantDirectory:
        """One directory. A record that is missing is answered from memory."""
        grant, record = self.read(key), self.record(key)
        if record is not None or key in self._damaged:
            return GrantDirectory(key, record, grant, self._damaged.get(key, ""), later=key in self._later)
        remembered = self._known.last(key)
        if remembered is not None:
            return GrantDirectory(key, remembered, grant, remembered=True)
        return GrantDirectory(key, None, grant, f"{self.folder(key) / RECORD} is missing")

    def owners(self) -> Mapping[str, str]:
        """Key -> UID of the pod that has this allocation, by its record, as `records`."""
        return {key: record.uid for key, record in self.records().items()}

    def records(self) -> Mapping[str, Record]:
        """Key -> the record of this allocation, as it is now. One that was read once is not read again; one that could not be is
        tried at each call."""
        self._read_new()
        return self._known.all()

    def of_pods(self, uids: Collection[str]) -> Mapping[str, Record]:
        """Those of `records` that name one of these pods."""
        self._read_new()
        return self._known.of_pods(uids)

    def _read_new(self) -> None:
        for key in self._listing.names().difference(self._known.keys()):
            self.record(key)

    def age_s(self, key: str, now: float) -> float:
        """Since the folder last changed."""
        try:
            return now - self.folder(key).stat().st_mtime
        except FileNotFoundError:
            return 0.0

    def remove(self, key: str) -> None:
        """An allocation that no container has any longer. A caller in a thread informs `durability`, on the event loop."""
        folder = self.folder(key)
        leftover = folder.with_name(f"{LEFTOVER}{key}")
        with suppress(FileNotFoundError):
            folder.rename(leftover)
        self._damaged.pop(key, None)  # from here on no thread finds it there, to remember it again
        self._later.discard(key)
        self._known.forget(key)
        self._granted.forget(key)
        shutil.rmtree(leftover, ignore_errors=True)
        self.sockets.remove(key)

    def collect(
        self,
        kept: Collection[str],
        *,
        now: float,
        older_than_s: float,
        ended: Collection[str] = (),
        ended_older_than_s: float = 0.0,
    ) -> list[str]:
        """Remove the directories that are not in `kept` and untouched for so long, with a record that can be read. Returns their keys.

        `ended` are those whose pod is known to have ended. Libraries of earlier installations are removed too: a grant that uses one has its own link.
        """
        pod_wait_s = dict.fromkeys(ended, ended_older_than_s)
        unkept = (key for key in self.keys() if key not in kept)
        old = [key for key in unkept if self.age_s(key, now) > pod_wait_s.get(key, older_than_s)]
        gone = [key for key in old if not self.damaged(key)]
        for key in gone:
            self.remove(key)
        self._forget_gone(kept)
        self._discard_leftovers()
        self.sockets.collect(self._made)
        self._library.collect(now=now, older_than_s=older_than_s)
        return gone

    def _made(self) -> set[str]:
        """Keys of directories that are there or being made, in this order: what is made goes from the one to the other."""
        making = set(self._making)
        return making.union(self.keys())

    def _forget_gone(self, kept: Collection[str]) -> None:
        """Forget directories that another process removed, but for `kept`. Allocate may make others meanwhile: what it remembers of them stays."""
        known, granted = set(self._known.keys()), set(self._granted.keys())  # before the disk is read
        there = {*self.keys(), *kept}
        for key in known - there:
            self._known.forget(key)
        for key in granted - there:
            self._granted.forget(key)

    def _discard_leftovers(self) -> None:
        """What a plugin that was killed had begun."""
        for folder in (self._root / "grants").glob(f"{LEFTOVER}*"):
            if folder.name[len(LEFTOVER) :] not in self._making and folder.name not in self.spares.names:
                shutil.rmtree(folder, ignore_errors=True)

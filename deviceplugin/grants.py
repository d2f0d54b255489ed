"""The state folder: the library, and one directory for each allocation of a share.

    lib/<sha256>/libtangram.so    the library by its content: a new one never touches an old one in use
    preload                       what containers find as /etc/ld.so.preload
    ld.so.preload                 the same for containers of the release before, which have the library at another path
    sockets/<key>/                mounted into the container as /.tangram/socket; the arbiter makes its socket there
    grants/.spare-<number>/       a directory for the next allocation (`spares`)
    grants/<key>/                 mounted into the container as /.tangram; made for one Allocate, never used again (`record`)
        libtangram.so             hard link to the library as it was at allocation
        socket/, arbiter.sock     the way to the arbiter (`sockets`)
        grant                     the container's limits; written before each start
        container                 the runtime's ID of the container, soon after each start (`containerids`)
        allocation.json           our own book, so that a restart of the plugin loses nothing

All of it but sockets/ belongs to the plugin alone: the arbiter may read the grants. A directory appears under its name with its book in it: a plugin that is killed before leaves one whose name begins with a dot.
Knows files. Who gets what was decided elsewhere.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec
import structlog

from deviceplugin import sealed
from deviceplugin.calls import at_once
from deviceplugin.files import content_of, discard_leftover, make_folder, size_of, sync, write_whole
from deviceplugin.listing import LEFTOVER, Listing
from deviceplugin.record import RECORD, Record, hash_of, new_suffix, of_ids, order_of, read_record
from deviceplugin.settling import Settling
from deviceplugin.sockets import Sockets
from deviceplugin.spares import Spares
from vgpu.codec import grant_from_text, grant_to_text
from vgpu.contract import CONTAINER_ID, GRANT, LIBRARY, PRELOAD_TEXTS, SOCKET, SOCKET_DIR
from vgpu.errors import BadDocument, NewerVersion
from vgpu.grant import Grant

log = structlog.get_logger("deviceplugin.grants")


@dataclass(frozen=True, slots=True)
class Folder:
    """A grant directory, as disk and memory know it."""

    key: str
    record: Record | None
    """None: there is no book that can be read."""
    grant: Grant | None = None
    """What was written here last; None when there is none that can be read."""
    trouble: str = ""
    """Why there is no record."""
    later: bool = False
    """A later plugin wrote the book: it is left as it is."""
    remembered: bool = False
    """The book is missing on the disk, and is answered from memory."""


class Grants:
    """The state folder of a node. `lull` as `calls.Calls.lull`."""

    def __init__(
        self, state_root: Path, library: Path, boot: str | None = None, lull: Callable[[], Awaitable[None]] = at_once
    ) -> None:
        self.boot = sealed.boot_id() if boot is None else boot
        self._root, self._source = state_root, library
        self._installed = state_root / "lib" / "none" / LIBRARY
        self._damaged: dict[str, str] = {}
        """Key -> what is wrong with its book, as it was told."""
        self._later: set[str] = set()
        """Those of them that a later plugin wrote."""
        self._making: set[str] = set()
        """Keys of directories that a thread is making."""
        self.settling = Settling(self.settle, self.fill_spares, lull)
        self._listing = Listing(state_root / "grants")
        self.sockets = Sockets(state_root, self.earlier)
        self.spares = Spares(state_root / "grants", LEFTOVER, self._complete)
        self._known: dict[str, Record] = {}
        """Key -> its book, of those read or written so far."""
        self._granted: dict[str, Grant] = {}
        """Key -> its grant, likewise."""

    def folder(self, key: str) -> Path:
        """Of one allocation."""
        return self._root / "grants" / key

    def install(self) -> Path:
        """Put the library and the preload files in place. Answers the library's path. Raises OSError."""
        content = self._source.read_bytes()
        self._installed = self._root / "lib" / hashlib.sha256(content).hexdigest()[:16] / LIBRARY
        for folder in (*(self._root / name for name in ("", "lib", "grants", "sockets")), self._installed.parent):
            make_folder(folder)
        if not self._installed.exists() or self._installed.stat().st_size != len(content):
            write_whole(self._installed, content, 0o755)
        self._restore_preload()
        for path in (self._installed, *(self._root / name for name in PRELOAD_TEXTS)):
            discard_leftover(path)
        self._discard_leftovers()
        for key in self.keys():
            if not self._of_earlier(key):
                self.sockets.furnish(self.folder(key))
        self.spares.fill()
        return self._installed

    def earlier(self) -> Iterator[str]:
        """Keys of directories that a plugin made which put the arbiter's socket into them."""
        return filter(self._of_earlier, self._listing.names())

    def _of_earlier(self, key: str) -> bool:
        return not (self.folder(key) / SOCKET_DIR).exists()

    def prepare(self, record: Record) -> str:
        """A directory for a new allocation: it has the library and no grant yet. Answers its key. Raises OSError.

        A kill loses nothing of it. A loss of power may, until `settle` has returned.
        """
        newest = max(map(order_of, self.keys_of(record.ids)), default=0)
        record = msgspec.structs.replace(record, suffix=new_suffix(newest + 1), boot=self.boot)
        key = record.key
        folder = self.folder(key)
        beside = self.spares.take() or folder.with_name(f"{LEFTOVER}{key}")
        self._making.add(key)
        try:
            make_folder(beside)
            self._complete(beside)  # also a spare: an earlier library may be in it, or a part missing
            self.sockets.make(key)  # the kubelet mounts it too
            sealed.write(beside / RECORD, record, durable=False)
            beside.rename(folder)
            self._listing.added(key)
            self._known[key] = record
        finally:
            self._making.discard(key)
            self.spares.done(beside)
        return key

    def _complete(self, folder: Path) -> None:
        """What is the same in each directory. Raises OSError."""
        self._link_library(folder)
        self.sockets.furnish(folder)

    def fill_spares(self) -> None:
        """The next Allocate finds a spare. One that cannot be made now may be later, and Allocate says why it cannot."""
        with suppress(OSError), self._listing.passing_over():
            self.spares.fill()

    def settle(self, key: str) -> None:
        """Return when the directory and its book outlive a loss of power. Waits for the disk. Raises OSError."""
        folder = self.folder(key)
        for path in (folder / RECORD, folder, folder.parent):  # the first waits, and takes the others with it
            sync(path)

    def restore(self, key: str) -> list[str]:
        """Put back what is missing of what a container mounts. Answers what was. Raises OSError."""
        folder, missing = self.folder(key), self._restore_preload()
        if make_folder(folder):
            missing.append(str(folder))
        if size_of(folder / LIBRARY) == 0:
            missing.append(LIBRARY)
            self._link_library(folder)
        if self.sockets.make(key):
            missing.append(str(self.sockets.path(key).parent))
        if str(folder) in missing or not self._of_earlier(key):
            missing += [SOCKET] * self.sockets.furnish(folder)
        else:
            self.sockets.link_earlier()
        return missing

    def write(self, key: str, grant: Grant) -> None:
        """The grant, for the library and the arbiter. Raises OSError."""
        path, content = self.folder(key) / GRANT, grant_to_text(grant).encode()
        if content_of(path) != content:
            write_whole(path, content, 0o444)
        self._granted[key] = grant

    def identify(self, key: str, container_id: str) -> bool:
        """Write whose container the directory is, for the arbiter. Answers whether that is new. Raises OSError."""
        path, content = self.folder(key) / CONTAINER_ID, f"{container_id}\n".encode()
        if content_of(path) == content:
            return False
        write_whole(path, content, 0o444)
        return True

    def put_back(self) -> list[str]:
        """Books and grants that somebody removed from directories that are still there. Answers their paths. Raises OSError.

        Without its grant, each new process of a container that runs is refused its memory, for as long as the container lives.
        """
        back = list[str]()
        for key, grant in list(self._granted.items()):
            if self.folder(key).is_dir() and not self.granted(key):
                self.write(key, grant)
                back.append(str(self.folder(key) / GRANT))
        for key, record in list(self._known.items()):
            if self.folder(key).is_dir() and not (self.folder(key) / RECORD).exists():
                self.update(record)
                back.append(str(self.folder(key) / RECORD))
        return back

    def read(self, key: str) -> Grant | None:
        """The grant as it stands, None when there is none that can be read."""
        try:
            self._granted[key] = grant = grant_from_text((self.folder(key) / GRANT).read_text())
        except (OSError, UnicodeError, BadDocument):
            return None
        return grant

    def granted(self, key: str) -> bool:
        """Was a grant written here?"""
        return (self.folder(key) / GRANT).exists()

    def socket(self, key: str) -> Path:
        """Where the arbiter listens."""
        return self.sockets.path(key)

    def record(self, key: str) -> Record | None:
        """Our book about one allocation, None when there is none that can be read. Why it cannot is told once."""
        try:
            record = read_record(self.folder(key) / RECORD)
        except (OSError, BadDocument) as error:
            if self._damaged.get(key) != str(error):
                self._damaged[key] = str(error)
                log.error("an allocation's book cannot be read: its folder is kept", key=key, error=str(error))
            (self._later.add if isinstance(error, NewerVersion) else self._later.discard)(key)
            return None
        self._damaged.pop(key, None)
        return record

    def damaged(self, key: str) -> bool:
        """Is there a book about this allocation that cannot be read? Then nobody knows whose it is, and it is not freed."""
        self.record(key)
        return key in self._damaged

    @property
    def damaged_count(self) -> int:
        """Books that cannot be read, of those looked at."""
        return len(self._damaged)

    def update(self, record: Record) -> None:
        """Write our book about an allocation. Raises OSError."""
        sealed.write(self.folder(record.key) / RECORD, record, durable=True)
        self._known[record.key] = record
        self._damaged.pop(record.key, None)
        self._later.discard(record.key)

    def keys(self) -> Iterator[str]:
        """Every allocation that has a directory."""
        yield from sorted(self._listing.scan())

    def of_ids(self, ids: Collection[str]) -> list[Folder]:
        """The directories of exactly these IDs, the newest first; also one that somebody removed, if we remember it."""
        return list(self.newest(ids))

    def newest(self, ids: Collection[str]) -> Iterator[Folder]:
        """As `of_ids`. Each is read when its turn comes: a container needs the first or two, and hundreds may be behind them."""
        return map(self.look, sorted(self.keys_of(ids), key=order_of, reverse=True))

    def keys_of(self, ids: Collection[str]) -> set[str]:
        """Names of the directories of exactly these IDs."""
        alike = hash_of(ids)
        removed = (key for key in list(self._known) if key.startswith(alike))
        return set(of_ids((*self._listing.alike(alike), *removed), ids))

    def look(self, key: str) -> Folder:
        """One directory. A book that is missing is answered from memory."""
        grant, record = self.read(key), self.record(key)
        if record is not None or key in self._damaged:
            return Folder(key, record, grant, self._damaged.get(key, ""), later=key in self._later)
        remembered = self._known.get(key)
        if remembered is not None:
            return Folder(key, remembered, grant, remembered=True)
        return Folder(key, None, grant, f"{self.folder(key) / RECORD} is missing")

    def owners(self) -> Mapping[str, str]:
        """Key -> UID of the pod that our book says has this allocation, as `books`."""
        return {key: record.uid for key, record in self.books().items()}

    def books(self) -> Mapping[str, Record]:
        """Key -> our book about this allocation. One that was read once is not read again; one that could not be is tried at
        each call."""
        unsettled = (key for key in sorted(self._listing.names()) if key not in self._known)
        self._known |= {key: record for key in unsettled if (record := self.record(key))}
        return self._known

    def of_pods(self, uids: Collection[str]) -> list[tuple[str, str]]:
        """(key, UID) of the allocations that our books say these pods have."""
        return [(key, record.uid) for key, record in self.books().items() if record.uid in uids]

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
        self._later.discard(key)
        self._known.pop(key, None)
        self._granted.pop(key, None)
        self.settling.forget(key)
        leftover = folder.with_name(f"{LEFTOVER}{key}")
        with suppress(FileNotFoundError):
            folder.rename(leftover)
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
        """Remove the directories that are not in `kept` and untouched for so long, with a book that can be read. Answers their keys.

        `ended` are those whose pod is known to have ended. Libraries of earlier installations go too: who has one has a link of his own.
        """
        patience_s = dict.fromkeys(ended, ended_older_than_s)
        unkept = (key for key in self.keys() if key not in kept)
        old = [key for key in unkept if self.age_s(key, now) > patience_s.get(key, older_than_s)]
        gone = [key for key in old if not self.damaged(key)]
        for key in gone:
            self.remove(key)
        self._forget(set(self.keys()) | set(kept))
        self._discard_leftovers()
        self.sockets.collect(
            [*self._making, *self.keys()]
        )  # in this order: what is made goes from the one to the other
        for folder in self._installed.parent.parent.glob("*"):
            if folder != self._installed.parent and now - folder.stat().st_mtime > older_than_s:
                shutil.rmtree(folder, ignore_errors=True)
        return gone

    def _forget(self, but: Iterable[str]) -> None:
        """What is remembered of directories that somebody else removed."""
        for key in self._known.keys() - but:
            del self._known[key]
        for key in self._granted.keys() - but:
            del self._granted[key]

    def _discard_leftovers(self) -> None:
        """What a plugin that was killed had begun."""
        for folder in (self._root / "grants").glob(f"{LEFTOVER}*"):
            if folder.name[len(LEFTOVER) :] not in self._making and folder.name not in self.spares.names:
                shutil.rmtree(folder, ignore_errors=True)

    def _restore_preload(self) -> list[str]:
        """Answers the names of those that were missing or changed."""
        texts = {name: text.encode() for name, text in PRELOAD_TEXTS.items()}
        missing = [name for name, text in texts.items() if content_of(self._root / name) != text]
        for name in missing:
            write_whole(self._root / name, texts[name], 0o644)
        return missing

    def _link_library(self, folder: Path) -> None:
        """The installed library, in place of one of an earlier installation. One that somebody removed is installed again."""
        target = folder / LIBRARY
        with suppress(FileNotFoundError):
            there = self._installed.stat()
            if there.st_size > 0 and os.path.samestat(there, target.stat()):
                return
        if size_of(self._installed) == 0:
            make_folder(self._installed.parent.parent)
            make_folder(self._installed.parent)
            write_whole(self._installed, self._source.read_bytes(), 0o755)
        beside = discard_leftover(target)
        try:
            beside.hardlink_to(self._installed)
        except OSError:
            shutil.copyfile(self._installed, beside)
            beside.chmod(0o755)
        beside.replace(target)

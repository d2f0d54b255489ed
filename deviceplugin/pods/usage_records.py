"""What each pod of the node uses, as a record on the node: `pods/<UID>.json` in the state folder, written before its first process starts.

The API server forgets a pod that is deleted by force; its processes run on. This record is the node's own record of what they use: the
GPUs, MiB and percent (or whole GPU, MIG instance), and the device IDs that the kubelet must not give to another pod meanwhile.
It goes when the API has no such pod and no process of it lives.

A record is begun in one file for all of them, which is made beforehand (`atomic_file.create_temporary`) or was the record of a pod that is gone.

Works on files alone. `orphan_finder` decides which pods are gone.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from threading import Lock
from typing import Final

import msgspec
import structlog

from deviceplugin.grants import checked_file as sealed
from deviceplugin.grants.atomic_file import create_temporary, discard_temporary, make_folder
from vgpu.api.codec import check_assigned_gpu
from vgpu.api.errors import BadDocument
from vgpu.api.grant import AssignedGpu
from vgpu.api.inventory import Orphan
from vgpu.api.sealed import UNREADABLE

FOLDER: Final = "pods"
WHAT: Final = "usage record of a pod"
BEGUN: Final = ".new"
"""Where each is begun."""
_FILE_NAME: Final = re.compile(r"[0-9A-Za-z-]{1,100}\Z")

log = structlog.get_logger("deviceplugin.pods.usage_records")


class UsageRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One pod."""

    uid: str
    namespace: str
    pod: str
    held: tuple[AssignedGpu, ...]
    """What it occupies at its peak, one part a GPU or MIG instance."""
    ids: dict[str, tuple[str, ...]] = {}
    """Resource -> device IDs that the kubelet gave it, sorted."""
    boot: str = ""
    """Boot ID at its last start: in another boot no process of it lives."""

    @property
    def orphan(self) -> Orphan:
        """As the inventory has it, once the API has no such pod."""
        return Orphan(self.uid, self.namespace, self.pod, self.held)


_records = msgspec.json.Decoder(UsageRecord)


class UsageRecords:
    """The records of a node. `boot` is the present boot ID."""

    def __init__(self, state_root: Path, boot: str) -> None:
        self.boot = boot
        self.damaged: dict[str, str] = {}
        """File name -> what is wrong with it. Such a file is kept; a start of its pod replaces it, unless a later plugin wrote it."""
        self._folder = state_root / FOLDER
        self._writing = Lock()
        """Its owner writes what is begun."""
        self._records: dict[str, UsageRecord] = {}
        self._users: dict[str, dict[str, str]] = {}
        """Resource -> device ID -> UID of the pod that had it last."""

    def load(self) -> None:
        """Read all records, after a start. Raises OSError when the folder cannot be read."""
        make_folder(self._folder)
        self.begin_next()
        for path in sorted(self._folder.glob("*.json")):
            discard_temporary(path)  # of an earlier plugin
            try:
                record = self._read(path)
            except (OSError, BadDocument) as error:
                self.damaged[path.name] = str(error)
                log.error(
                    "a pod's usage record cannot be read: what the pod uses is known from its grants alone",
                    error=str(error),
                )
                continue
            if record is not None:
                self.remember(record)

    def __iter__(self) -> Iterator[UsageRecord]:
        return iter(list(self._records.values()))

    def get(self, uid: str) -> UsageRecord | None:
        """The record of one pod."""
        return self._records.get(uid)

    def enter(self, record: UsageRecord, ids: Mapping[str, Collection[str]]) -> None:
        """The pod has these IDs too. A plugin that is killed after this returned finds it again. Raises OSError."""
        before = self._records.get(record.uid)
        known = before.ids if before is not None else {}
        merged = {r: tuple(sorted({*known.get(r, ()), *ids.get(r, ())})) for r in sorted({*known, *ids})}
        record = msgspec.structs.replace(record, ids=merged, boot=self.boot)
        path = self._path(record.uid)
        if record == before and path.exists():
            return
        with self._writing:
            try:
                self._write(path, record)
            except FileNotFoundError:  # the folder was removed
                make_folder(self._folder)
                self._write(path, record)
        self.remember(record)
        self.damaged.pop(path.name, None)

    def begin_next(self) -> None:
        """Make the file in which the next record is begun, when no call waits for it. If that fails, the writer of the record reports why."""
        with self._writing, suppress(OSError):
            create_temporary(self._folder / BEGUN)

    def remember(self, record: UsageRecord) -> None:
        """Until the next start of this plugin: of a pod that is known from its grants alone, too."""
        self._records[record.uid] = record
        for resource, ids in record.ids.items():
            self._users.setdefault(resource, {}).update(dict.fromkeys(ids, record.uid))

    def forget(self, uids: Iterable[str]) -> None:
        """No process of these pods lives. Raises OSError."""
        for uid in uids:
            path = self._path(uid)
            # the next record is written there: neither is a file removed nor one made
            with self._writing, suppress(FileNotFoundError):
                path.replace(self._folder / BEGUN)
            record = self._records.pop(uid, None)
            for resource, ids in (record.ids if record is not None else {}).items():
                users = self._users[resource]
                for one in ids:
                    if users.get(one) == uid:
                        del users[one]
            self.damaged.pop(path.name, None)

    def users(self, resource: str) -> Mapping[str, str]:
        """Device ID -> UID of the pod that had it last, as far as a record knows."""
        return self._users.get(resource, {})

    def _write(self, path: Path, record: UsageRecord) -> None:
        """After a loss of power no process lives that it could describe, so this does not wait for the disk."""
        sealed.write(path, record, durable=False, temporary=self._folder / BEGUN)

    def _path(self, uid: str) -> Path:
        name = uid if _FILE_NAME.match(uid) else hashlib.sha256(uid.encode()).hexdigest()
        return self._folder / f"{name}.json"

    def _read(self, path: Path) -> UsageRecord | None:
        found = sealed.read(path, WHAT)
        if found is None:
            return None
        try:
            record = _records.decode(found.body)
        except UNREADABLE as error:
            raise BadDocument(f"{path} has {len(found.body)} bytes that are no {WHAT}: {str(error)[:300]}") from None
        if self._path(record.uid).name != path.name:
            raise BadDocument(
                f"{path} is about pod UID {record.uid[:80]}: it must be about the one that it is named by"
            )
        for assigned in record.held:
            check_assigned_gpu(f"{path}: pod {record.namespace}/{record.pod}", assigned)
        return record

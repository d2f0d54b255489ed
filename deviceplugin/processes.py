"""Which pods have living processes on this node, from the node's /proc. What a cgroup's name means is decided in `vgpu.cgroup`.

Each process may be gone at any moment, which is no error. A zombie does not count: its memory is freed. A process whose first thread
has ended and whose others run does count, though the kernel shows it as a zombie.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Final

from vgpu.cgroup import depth_of, place_of
from vgpu.process_stat import process_stat

PROC: Final = Path("/proc")
LONGEST: Final = 64 * 1024
"""Bytes that are read of a cgroup file: 14 hierarchies of version 1 with paths of 4,096 each. Specified by PATH_MAX."""


_ROOT: Final = b":/\n"
"""How the line of a hierarchy ends of which a process is in the root. Version 2 has one line, and a process that has ended keeps its path."""


class Processes:
    """Looks at `proc`, the /proc of the node."""

    def __init__(self, proc: Path = PROC) -> None:
        self._proc = proc
        self._seen: dict[str, str] = {}
        """Pod UID -> a process of it that lived when we looked last."""

    @property
    def blind(self) -> bool:
        """Is this the /proc of our own container, which shows no other pod's processes (no hostPID)?"""
        first = _text(self._proc / "1/cgroup")
        return not first or (self._proc == PROC and first == _text(PROC / "self/cgroup"))

    def living(self, uids: Collection[str]) -> frozenset[str]:
        """Those of these pods that have a living process. Reads all of /proc at most once: some 10 us a process."""
        depth = self._depth()
        found = {uid for uid in uids if (pid := self._seen.get(uid)) and self._is_of(pid, uid, depth)}
        missing = set(uids) - found
        names = {name.encode() for uid in missing for name in (uid, uid.replace("-", "_"))}
        for pid in self._pids() if missing else ():
            content = self._cgroup(pid)
            if not any(name in content for name in names):
                continue  # so nearly all: what a look costs is reading them
            uid = _pod(content, depth)
            if uid in missing and self._lives(pid):
                found.add(uid)
                missing.discard(uid)
                self._seen[uid] = pid
                if not missing:
                    break
        self._seen = {uid: pid for uid, pid in self._seen.items() if uid in found}
        return frozenset(found)

    def mounts(self, uids: Collection[str]) -> Iterator[tuple[str, str]]:
        """(pod UID, text of mountinfo) of each process of these pods. Reads all of /proc: some 10 us a process."""
        names, depth = {name.encode() for uid in uids for name in (uid, uid.replace("-", "_"))}, self._depth()
        for pid in self._pids() if uids else ():
            content = self._cgroup(pid)
            if any(name in content for name in names) and (uid := _pod(content, depth)) in uids:
                yield uid, _text(self._proc / pid / "mountinfo")

    def _is_of(self, pid: str, uid: str, depth: int) -> bool:
        return _pod(self._cgroup(pid), depth) == uid and self._lives(pid)

    def _depth(self) -> int:
        """As `vgpu.cgroup` needs it: this program is in a pod of the node."""
        return depth_of(_text(self._proc / "self/cgroup"))

    def _cgroup(self, pid: str) -> bytes:
        """Of the first thread, or of another one where that has ended: then version 1 of cgroups shows the root's."""
        content = self._read_cgroup(pid)
        if content.count(_ROOT) > 1 and _ended(self._proc / pid):
            return next(
                (self._read_cgroup(f"{pid}/task/{one.name}") for one in self._threads(pid) if not _ended(one)), b""
            )
        return content

    def _read_cgroup(self, thread: str) -> bytes:
        try:
            descriptor = os.open(f"{self._proc}/{thread}/cgroup", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return b""
        try:
            return os.read(descriptor, LONGEST)
        except OSError:
            return b""
        finally:
            os.close(descriptor)

    def _pids(self) -> Iterator[str]:
        try:
            with os.scandir(self._proc) as entries:
                names = [entry.name for entry in entries]
        except OSError:
            return
        yield from (name for name in names if name.isdigit())

    def _lives(self, pid: str) -> bool:
        if not _ended(self._proc / pid):
            return True
        return not all(map(_ended, self._threads(pid)))

    def _threads(self, pid: str) -> list[Path]:
        try:
            return list((self._proc / pid / "task").iterdir())
        except OSError:
            return []


def _pod(cgroup: bytes, depth: int) -> str:
    """The pod whose cgroup it is, as the arbiter attributes its memory; empty when it is none's."""
    return place_of(cgroup.decode(errors="replace"), depth).pod


def _ended(thread: Path) -> bool:
    """Has this thread ended, or is it gone?"""
    try:
        stat = process_stat((thread / "stat").read_bytes())
    except OSError:
        return True
    return stat is None or stat.ended


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""

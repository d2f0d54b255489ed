"""Which pods have living processes on this node, from the node's /proc. What a cgroup's name means is decided in `vgpu.api.cgroup`.

A check reads one file of each process of the node, some 10 us each, and `yield_to_kubelet` is called between some of them.

Each process may be gone at any moment, which is no error. A zombie does not count: its memory is freed. A process whose first thread
has ended and whose others run does count, though the kernel shows it as a zombie.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Final

from vgpu.api.cgroup import UID, depth_of, place_of
from vgpu.api.process_stat import process_stat

PROC: Final = Path("/proc")
LONGEST: Final = 64 * 1024
"""Bytes that are read of a file. One of cgroups has 14 hierarchies of version 1 with paths of 4,096 each. Specified by PATH_MAX."""
EACH: Final = 16
"""Processes between two calls of `yield_to_kubelet`: 0.2 ms of work."""
_NAMED: Final = re.compile(f"pod({UID})".encode())
"""What may be the name of a pod's cgroup. Found faster than names are decoded, and as fast for a hundred pods as for one."""
_ROOT: Final = b":/\n"
"""How the line of a hierarchy ends of which a process is in the root. Version 2 has one line, and a process that has ended keeps its path."""


class PodProcesses:
    """Looks at `proc`, the /proc of the node."""

    def __init__(self, proc: Path = PROC, yield_to_kubelet: Callable[[], None] = lambda: None) -> None:
        self._proc, self._yield_to_kubelet = proc, yield_to_kubelet
        self._seen: dict[str, str] = {}
        """Pod UID -> a process of it that lived at the last check."""

    @property
    def blind(self) -> bool:
        """Is this the /proc of our own container, which shows no other pod's processes (no hostPID)?"""
        first = self._read("1/cgroup")
        return not first or (self._proc == PROC and first == self._read("self/cgroup"))

    def living(self, uids: Collection[str]) -> frozenset[str]:
        """Those of these pods that have a living process. Reads all of /proc at most once."""
        depth = self._depth()
        found = {uid for uid in uids if (pid := self._seen.get(uid)) and self._is_of(pid, uid, depth)}
        missing = set(uids) - found
        for pid, content in self._naming(missing):
            uid = _pod(content, depth)
            if uid in missing and self._lives(pid):
                found.add(uid)
                missing.discard(uid)
                self._seen[uid] = pid
                if not missing:
                    break
        self._seen = {uid: pid for uid, pid in self._seen.items() if uid in found}
        return frozenset(found)

    def mounts(self, uids: Collection[str]) -> Iterator[tuple[str, str, str]]:
        """(pod UID, text of mountinfo, pid) of each process of these pods. Reads all of /proc."""
        depth = self._depth()
        for pid, content in self._naming(uids):
            if (uid := _pod(content, depth)) in uids:
                yield uid, _text(self._proc / pid / "mountinfo"), pid

    def has_device(self, pid: str, name: str) -> bool | None:
        """Is there a file of this name in the process's own /dev? None: that cannot be seen, as without the right to trace it, or it is gone.

        One name is looked up, in a folder that is no link: what else the container put there costs nothing.
        """
        opened: list[int] = []
        try:
            opened.append(os.open(self._proc / pid / "root", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC))
            opened.append(os.open("dev", os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=opened[0]))
            os.stat(name, dir_fd=opened[1], follow_symlinks=False)
        except FileNotFoundError:
            return False if len(opened) == 2 and self._lives(pid) else None
        except OSError:
            return None
        finally:
            for descriptor in opened:
                os.close(descriptor)
        return True

    def _naming(self, uids: Collection[str]) -> Iterator[tuple[str, bytes]]:
        """(number, cgroup) of each process whose cgroup names any of these pods."""
        names = {uid.encode() for uid in uids}
        for number, pid in enumerate(self._pids() if names else ()):
            if number % EACH == 0:
                self._yield_to_kubelet()
            content = self._cgroup(pid)
            if b"pod" not in content:
                continue  # so nearly all: what a check costs is reading them
            if not names.isdisjoint(name.replace(b"_", b"-") for name in _NAMED.findall(content)):
                yield pid, content

    def _is_of(self, pid: str, uid: str, depth: int) -> bool:
        return _pod(self._cgroup(pid), depth) == uid and self._lives(pid)

    def _depth(self) -> int:
        """As `vgpu.api.cgroup` needs it: this program is in a pod of the node."""
        return depth_of(self._read("self/cgroup").decode(errors="replace"))

    def _cgroup(self, pid: str) -> bytes:
        """Of the first thread, or of another one where that has ended: then version 1 of cgroups shows the root's."""
        content = self._read(f"{pid}/cgroup")
        if content.count(_ROOT) > 1 and self._ended(pid):
            return next((self._read(f"{one}/cgroup") for one in self._threads(pid) if not self._ended(one)), b"")
        return content

    def _read(self, name: str) -> bytes:
        """A file that the kernel returns in one piece; empty when it is gone."""
        try:
            descriptor = os.open(f"{self._proc}/{name}", os.O_RDONLY | os.O_CLOEXEC)
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
        return not self._ended(pid) or not all(map(self._ended, self._threads(pid)))

    def _threads(self, pid: str) -> list[str]:
        try:
            return [f"{pid}/task/{one.name}" for one in (self._proc / pid / "task").iterdir()]
        except OSError:
            return []

    def _ended(self, thread: str) -> bool:
        """Has this thread ended, or is it gone?"""
        stat = process_stat(self._read(f"{thread}/stat"))
        return stat is None or stat.ended


def _pod(cgroup: bytes, depth: int) -> str:
    """The pod whose cgroup it is, as the arbiter attributes its memory; empty when it is none's."""
    return place_of(cgroup.decode(errors="replace"), depth).pod


def _text(path: Path) -> str:
    """Of mountinfo, which takes several reads."""
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""

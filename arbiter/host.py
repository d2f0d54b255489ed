"""Facts about processes of the host, from /proc. Each may be gone at any moment, which is no error.

All facts come from the kernel; only `grant_named` reads a statement of the container itself. The container of a process follows from
its cgroup, and from the mount at one of `GRANT_DIRS` in its mount namespace: a directory of the grants folder, which the node mounts
read-only. `vgpu.memory.attribution` decides by the two.
"""

from __future__ import annotations

import itertools
import os
import signal
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Final

from arbiter.grant_file import read_container_id, read_grant
from vgpu.api.cgroup import NOWHERE, CgroupOwner, depth_of
from vgpu.api.cgroup import place_of as place_in
from vgpu.api.contract import CONTAINER_ID, GRANT, GRANT_DIRS
from vgpu.api.errors import BadDocument
from vgpu.api.mountinfo import mounts_in
from vgpu.api.process_stat import process_stat
from vgpu.memory.attribution import Owner, Owners

GRANT_VARIABLE: Final = "TANGRAM_GRANT"
MPS_SERVER: Final = b"nvidia-cuda-mps"
LIBRARY_THREAD: Final = "tangram"
"""The name of the library's thread. Specified: shim/src/link/helper.c."""
THREADS_LOOKED_AT: Final = 256
"""A process can have any number. Guessed: the library starts its own with the first context."""
NAMED_EXAMINED: Final = 4
"""Threads of a process with the library's name that are examined. The library starts one; a program can give any number that name."""
READ_BYTES: Final = 2**20
"""Bytes read from one file of a process. The process decides its length: it may have 100,000 mounts. The rest is ignored: a grant whose mount is there
counts as not mounted."""
MOST_PIDS: Final = 16_384
"""Processes of the node that are examined to find those of some containers: some 1.3 s at worst, a process takes 0.08 ms (measured). Guessed: nodes
have hundreds."""
KILL_ROUNDS: Final = 4
"""Rounds of killing: a container's processes may start others meanwhile. Guessed: its first process ends in the first round, and all others with it."""
COMMAND_CHARACTERS: Final = 200
NO_SIBLINGS: Final[Mapping[str, str]] = MappingProxyType({})
_STOPPED: Final = frozenset("Tt")
_START_STACK: Final = 25
"""Of the fields of `stat` behind the command: the 28th of all."""
"""States of a process that is alive but cannot answer: stopped, traced."""


def pids(most: int, proc: Path = Path("/proc")) -> list[int]:
    """At most `most` of the node's processes. Raises OSError."""
    with os.scandir(proc) as entries:
        return [int(name) for name in itertools.islice((e.name for e in entries if e.name.isdecimal()), most)]


def command_of(pid: int) -> str:
    """The command line, as `ps` shows it; empty for a process that is gone."""
    words = _read(pid, "cmdline")
    text = words.rstrip(b"\0").replace(b"\0", b" ").decode(errors="replace")
    return "".join(c if c.isprintable() else "?" for c in text)[:COMMAND_CHARACTERS]


def is_mps_server(pid: int) -> bool:
    """Whether it has the name nvidia-cuda-mps-server, of which the kernel stores 15 characters."""
    return _read(pid, "comm").startswith(MPS_SERVER)


def runs(pid: int) -> bool:
    """Whether it exists and is not stopped."""
    stat = process_stat(_read(pid, "stat"))
    return stat is not None and not stat.ended and stat.state not in _STOPPED


def started_at(pid: int) -> int:
    """Its start in clock ticks since boot, which identifies a process together with its pid; 0 = gone."""
    stat = process_stat(_read(pid, "stat"))
    return stat.started if stat is not None else 0


def lives_since(pid: int) -> int:
    """The same; 0 also of one whose threads have all ended, although nobody has waited for it."""
    return 0 if _has_ended(_living(pid)) else started_at(pid)


def image_of(pid: int) -> int:
    """A number that changes when the process executes another program: where its stack began, random for each. 0 = gone, or the kernel does not show
    it to this process."""
    fields = _read(pid, "stat").rpartition(b")")[2].split()
    return int(fields[_START_STACK]) if len(fields) > _START_STACK else 0


def pid_inside(pid: int) -> int:
    """Its pid in its own pid namespace; 0 = gone."""
    for line in _read(pid, "status").split(b"\n"):
        if line.startswith(b"NSpid:"):
            return int(line.split()[-1])
    return 0


def key_of(pid: int, grants: Path, named_in: Path | None) -> str | None:
    """Name of the grant directory to which a process belongs; the first one if several of its pod count as one."""
    at, shown = place(pid), key_shown(pid, grants, named_in)
    if not at.pod:
        return shown
    of = owners_in(grants).of(at, shown)
    return of[0] if of else None


def place(pid: int) -> CgroupOwner:
    """Its pod and container by its cgroup."""
    own = _read("self", "cgroup").decode(errors="replace")
    return place_in(_read(_living(pid), "cgroup").decode(errors="replace"), depth_of(own))


def key_shown(pid: int, grants: Path, named_in: Path | None) -> str | None:
    """The grant mounted in its namespace; otherwise, with `named_in`, that of `grant_named`."""
    mounted = grant_of(pid, grants)
    return grant_named(pid, named_in) if mounted is None and named_in is not None else mounted


def grant_of(pid: int, grants: Path) -> str | None:
    """Name of the directory in `grants` that is mounted in its namespace; None also for another folder with the same name."""
    mounted = grant_mount(mounts_of(pid))
    ours = place_of(_read("self", "mountinfo").decode(errors="replace"), os.path.realpath(grants))
    return key_under(mounted, ours)


def owners_in(grants: Path) -> Owners:
    """The owners of all directories with a readable grant."""
    owners = []
    for folder in sorted(grants.iterdir()) if grants.is_dir() else ():
        try:
            uid = read_grant(folder / GRANT).uid
        except (OSError, UnicodeDecodeError, BadDocument):  # the device plugin reports a damaged grant
            continue
        owners.append(Owner(folder.name, uid, read_container_id(folder / CONTAINER_ID)))
    return Owners(owners)


def mounts_of(pid: int) -> str:
    """The mounts in the process's view. A process that changed its root has no grant in its view: then the view of the library's thread, which keeps the
    root with which it started."""
    mountinfo = (_read(pid, "mountinfo") or _read(_living(pid), "mountinfo")).decode(errors="replace")
    if grant_mount(mountinfo) is not None:
        return mountinfo
    texts = (_read(thread, "mountinfo").decode(errors="replace") for thread in _threads(pid, LIBRARY_THREAD))
    return next((text for text in texts if grant_mount(text) is not None), mountinfo)


def key_under(mounted: tuple[str, str] | None, grants: tuple[str, str] | None) -> str | None:
    """Name of the mounted directory, if it is in the grants folder: file systems and paths as `mounted_at` returns them."""
    if mounted is None or grants is None or mounted[0] != grants[0]:
        return None
    parent, _, key = mounted[1].rpartition("/")
    return key if key and parent == grants[1] else None


def grant_in(mountinfo: str, folder: str) -> str | None:
    """Name of the directory that is mounted as the grant, by the text of /proc/<pid>/mountinfo, from a folder named `folder`."""
    mounted = grant_mount(mountinfo)
    parent, _, key = mounted[1].rpartition("/") if mounted is not None else ("", "", "")
    return key if key and parent.rpartition("/")[2] == folder else None


def grant_mount(mountinfo: str) -> tuple[str, str] | None:
    """As `mounted_at`, at the first of `GRANT_DIRS` at which anything is mounted."""
    return next((mounted for at in GRANT_DIRS if (mounted := mounted_at(mountinfo, at)) is not None), None)


def mounted_at(mountinfo: str, at: str) -> tuple[str, str] | None:
    """File system, by number, and the path in it of the mount at exactly that path. A mount over another hides it, so the last
    one counts."""
    found = None
    for one in mounts_in(mountinfo):
        if one.at == at:
            found = one.device, one.root
    return found


def place_of(mountinfo: str, path: str) -> tuple[str, str] | None:
    """File system, by number, and the path in it of a path without links, for a process that has these mounts."""
    path = "".join(f"\\{ord(c):03o}" if c in " \t\n\\" else c for c in path)
    above, rest = path.rstrip("/"), ""
    while (mounted := mounted_at(mountinfo, above or "/")) is None:
        if not above:
            return None
        above, _, name = above.rpartition("/")
        rest = f"/{name}{rest}"
    return mounted[0], mounted[1].rstrip("/") + rest


def grant_named(pid: int, grants: Path) -> str | None:
    """Name of the directory in `grants` whose grant this process was started with, as `tangramctl run` starts programs.

    The process states it itself, so it is read only if there are no mounts, and only for processes of the arbiter's own user: no
    other user can bring a run over its limit by naming it.
    """
    if user_of(_read(pid, "status").decode(errors="replace")) != os.geteuid():
        return None
    prefix = f"{GRANT_VARIABLE}={grants}/".encode()
    for word in _read(pid, "environ").split(b"\0"):
        if word.startswith(prefix):
            key, _, name = word[len(prefix) :].rpartition(b"/")
            return os.fsdecode(key) if name == b"grant" and key and b"/" not in key else None
    return None


def user_of(status: str) -> int | None:
    """Real user, by the text of /proc/<pid>/status. The folder's owner is the effective user: root, for a program with the set-user-ID
    bit that any user started."""
    for line in status.splitlines():
        if line.startswith("Uid:"):
            return int(line.split()[1])
    return None


def sees_grant(pid: int, grants: Path) -> bool | None:
    """Whether any directory of the grants folder is mounted in a process's view. None = unknown: the process is gone, or the folder does not exist."""
    mountinfo = mounts_of(pid)
    ours = place_of(_read("self", "mountinfo").decode(errors="replace"), os.path.realpath(grants))
    if not mountinfo or ours is None:
        return None
    return any(one.device == ours[0] and one.directory.rpartition("/")[0] == ours[1] for one in mounts_in(mountinfo))


def rejection_reason(
    pid: int,
    folder: str,
    key: str,
    *,
    mount_needed: bool,
    uid: str = "",
    siblings: Mapping[str, str] = NO_SIBLINGS,
) -> str | None:
    """Why the arbiter rejects a process at the socket of grant directory `key`; None = it does not.

    `siblings`: the other grant directories of its pod, by the runtime's ID of their containers. A process whose cgroup is of one of these is rejected,
    whatever it has mounted: root of a container can change its root to another one of its pod. With `mount_needed` exactly that directory must be mounted somewhere in its mount namespace, as the node does it for the container
    of the grant. The cgroup of a process without a mounted grant must be of the pod `uid`. A process that the arbiter cannot see (pid 0)
    is not rejected, because nothing is known about it.
    """
    if pid == 0:
        return None
    mountinfo = mounts_of(pid)
    theirs = grant_in(mountinfo, folder)
    if theirs is not None and theirs != key:
        return f"this socket is another container's: yours is in {theirs}"
    at = place(pid) if siblings or theirs is None else NOWHERE
    if (sibling := siblings.get(at.container)) is not None:
        return f"this socket is another container's: yours is in {sibling}"
    in_pod = theirs is None and uid != "" and at.pod == uid
    if mount_needed and not in_pod and not shows(mountinfo, folder, key):
        return f"process {pid} has no mount of grant {key}: this socket is for the container that has"
    return None


def shows(mountinfo: str, folder: str, key: str) -> bool:
    """Whether this grant directory is mounted, at any path. An image may have a link in the path, and a sandbox its own root."""
    return any(one.root == f"/{key}" or one.root.endswith(f"/{folder}/{key}") for one in mounts_in(mountinfo))


def kill(pid: int, started: int) -> bool:
    """Kill the process with this pid and start. Returns whether it still existed."""
    try:
        handle = os.pidfd_open(pid)
    except OSError:
        return False
    try:
        if not started or started_at(pid) != started:
            return False
        signal.pidfd_send_signal(handle, signal.SIGKILL)
    except OSError:  # it is gone, or may not be killed
        return False
    finally:
        os.close(handle)
    return True


def kill_all(at: CgroupOwner) -> int:
    """Kill every process of a container, by its cgroup, and those that they start meanwhile. Returns how many existed."""
    passed, ended = set[int](), 0
    for _ in range(KILL_ROUNDS):
        there = dict[int, int]()
        for pid in _some_pids():
            if pid in passed:
                continue
            started = started_at(pid)  # before its place: another process may have the pid by then
            if place(pid) == at:
                there[pid] = started
            else:
                passed.add(pid)
        if not there:
            break
        killed = {pid for pid, started in there.items() if kill(pid, started)}
        passed |= killed
        ended += len(killed)
    return ended


def _some_pids() -> list[int]:
    """The first `MOST_PIDS` processes of the node."""
    try:
        return pids(MOST_PIDS)
    except OSError:
        return []


def _living(pid: int) -> int | str:
    """The thread whose /proc folder shows what all threads of a process share. After the first thread has ended, the kernel shows no mounts for it, and with
    version 1 of cgroups the root's: then it is another thread."""
    if not _has_ended(pid):
        return pid
    return next((thread for thread in _all_threads(pid) if not _has_ended(thread)), pid)


def _has_ended(thread: int | str) -> bool:
    stat = process_stat(_read(thread, "stat"))
    return stat is not None and stat.ended


def _threads(pid: int, name: str) -> list[str]:
    """Folders in /proc of its threads with this name."""
    named = (thread for thread in _all_threads(pid) if _read(thread, "comm") == f"{name}\n".encode())
    return list(itertools.islice(named, NAMED_EXAMINED))


def _all_threads(pid: int) -> list[str]:
    """Folders in /proc of its first `THREADS_LOOKED_AT` threads."""
    try:
        with os.scandir(f"/proc/{pid}/task") as entries:
            return [f"{pid}/task/{entry.name}" for entry in itertools.islice(entries, THREADS_LOOKED_AT)]
    except OSError:
        return []


def _read(pid: int | str, name: str) -> bytes:
    # `Path.read_bytes` makes three more calls, and this is read for each process each second
    try:
        descriptor = os.open(f"/proc/{pid}/{name}", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return b""
    content = b""
    try:
        # a shorter answer is not the end: the kernel returns the text in parts
        while len(content) < READ_BYTES and (part := os.read(descriptor, 65536)):
            content += part
    except OSError:
        return b""
    finally:
        os.close(descriptor)
    return content

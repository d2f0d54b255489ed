"""Facts about processes of the host, from /proc. Each may be gone at any moment, which is no error.

The kernel alone answers: nothing here but `grant_named` is what a container says of itself. Which container a process belongs to follows from what is
its cgroup, and by what is mounted at one of `GRANT_DIRS` in its mount namespace: a directory of the grants folder, put there by the node and
read-only. What follows from the two `vgpu.memory.attribution` decides.
"""

from __future__ import annotations

import itertools
import os
import signal
from pathlib import Path
from typing import Final

from arbiter.grant_file import read_container_id, read_grant
from vgpu.api.cgroup import Place, depth_of
from vgpu.api.cgroup import place_of as place_in
from vgpu.api.contract import CONTAINER_ID, GRANT, GRANT_DIRS
from vgpu.api.errors import BadDocument
from vgpu.api.mountinfo import mounts_in
from vgpu.api.process_stat import process_stat
from vgpu.memory.attribution import Owner, Owners

GRANT_VARIABLE: Final = "TANGRAM_GRANT"
MPS_SERVER: Final = b"nvidia-cuda-mps"
LIBRARY_THREAD: Final = "tangram"
"""What the library calls its thread. Specified: shim/src/link/helper.c."""
THREADS_LOOKED_AT: Final = 256
"""A process can have any number. Guessed: the library starts its own with the first context."""
NAMED_LOOKED_AT: Final = 4
"""Of a process's threads that have the library's name. It starts one; a program can call any number so."""
READ_BYTES: Final = 2**20
"""Of one file of a process, whose length the process decides: it may have 100,000 mounts. What is behind that is not seen: a grant whose mount stands there is not mounted."""
MOST_PIDS: Final = 16_384
"""Processes of the node that are looked at for those of some containers: some 1.3 s at worst, a process takes 0.08 ms (measured). Guessed: nodes have hundreds."""
KILL_LOOKS: Final = 4
"""While a container's processes are ended, they may start others. Guessed: its first process ends with the first look, and all others with it."""
COMMAND_CHARACTERS: Final = 200
_STOPPED: Final = frozenset("Tt")
"""States of a process that answers nothing though it lives: stopped, traced."""


def pids(most: int, proc: Path = Path("/proc")) -> list[int]:
    """So many of the node's processes at most. Raises OSError."""
    with os.scandir(proc) as entries:
        return [int(name) for name in itertools.islice((e.name for e in entries if e.name.isdecimal()), most)]


def command_of(pid: int) -> str:
    """The command line, as `ps` shows it; empty for a process that is gone."""
    words = _read(pid, "cmdline")
    text = words.rstrip(b"\0").replace(b"\0", b" ").decode(errors="replace")
    return "".join(c if c.isprintable() else "?" for c in text)[:COMMAND_CHARACTERS]


def is_mps_server(pid: int) -> bool:
    """By its name, of which the kernel keeps 15 characters: nvidia-cuda-mps-server."""
    return _read(pid, "comm").startswith(MPS_SERVER)


def runs(pid: int) -> bool:
    """Is it there and not stopped?"""
    stat = process_stat(_read(pid, "stat"))
    return stat is not None and not stat.ended and stat.state not in _STOPPED


def started_at(pid: int) -> int:
    """With its pid this names a process for good: in clock ticks since boot; 0 = gone."""
    stat = process_stat(_read(pid, "stat"))
    return stat.started if stat is not None else 0


def pid_inside(pid: int) -> int:
    """Its number in its own pid namespace; 0 = gone."""
    for line in _read(pid, "status").split(b"\n"):
        if line.startswith(b"NSpid:"):
            return int(line.split()[-1])
    return 0


def key_of(pid: int, grants: Path, named_in: Path | None) -> str | None:
    """Name of the grant directory that a process belongs to, and the first one where several of its pod count as one."""
    at, shown = place(pid), key_shown(pid, grants, named_in)
    if not at.pod:
        return shown
    of = owners_in(grants).of(at, shown)
    return of[0] if of else None


def place(pid: int) -> Place:
    """Its pod and container by its cgroup."""
    own = _read("self", "cgroup").decode(errors="replace")
    return place_in(_read(_living(pid), "cgroup").decode(errors="replace"), depth_of(own))


def key_shown(pid: int, grants: Path, named_in: Path | None) -> str | None:
    """Mounted in its namespace, else, with `named_in`, as `grant_named`."""
    mounted = grant_of(pid, grants)
    return grant_named(pid, named_in) if mounted is None and named_in is not None else mounted


def grant_of(pid: int, grants: Path) -> str | None:
    """Name of the directory in `grants` that is mounted in its namespace; None also for another folder that is named alike."""
    mounted = grant_mount(mounts_of(pid))
    ours = place_of(_read("self", "mountinfo").decode(errors="replace"), os.path.realpath(grants))
    return key_under(mounted, ours)


def owners_in(grants: Path) -> Owners:
    """Of every directory with a grant that can be read."""
    owners = []
    for folder in sorted(grants.iterdir()) if grants.is_dir() else ():
        try:
            uid = read_grant(folder / GRANT).uid
        except (OSError, UnicodeDecodeError, BadDocument):  # the device plugin reports one that is damaged
            continue
        owners.append(Owner(folder.name, uid, read_container_id(folder / CONTAINER_ID)))
    return Owners(owners)


def mounts_of(pid: int) -> str:
    """What is mounted where the process can see it. One that changed its root sees no grant any more: then what the library's thread sees, which
    keeps the root that it started with."""
    mountinfo = (_read(pid, "mountinfo") or _read(_living(pid), "mountinfo")).decode(errors="replace")
    if grant_mount(mountinfo) is not None:
        return mountinfo
    texts = (_read(thread, "mountinfo").decode(errors="replace") for thread in _threads(pid, LIBRARY_THREAD))
    return next((text for text in texts if grant_mount(text) is not None), mountinfo)


def key_under(mounted: tuple[str, str] | None, grants: tuple[str, str] | None) -> str | None:
    """Name of what is mounted, where that is a directory of the grants folder: file systems and paths as `mounted_at` tells them."""
    if mounted is None or grants is None or mounted[0] != grants[0]:
        return None
    parent, _, key = mounted[1].rpartition("/")
    return key if key and parent == grants[1] else None


def grant_in(mountinfo: str, folder: str) -> str | None:
    """Name of what is mounted as the grant by the text of /proc/<pid>/mountinfo, of a folder that has the name `folder`."""
    mounted = grant_mount(mountinfo)
    parent, _, key = mounted[1].rpartition("/") if mounted is not None else ("", "", "")
    return key if key and parent.rpartition("/")[2] == folder else None


def grant_mount(mountinfo: str) -> tuple[str, str] | None:
    """As `mounted_at`, at the first of `GRANT_DIRS` at which anything is mounted."""
    return next((mounted for at in GRANT_DIRS if (mounted := mounted_at(mountinfo, at)) is not None), None)


def mounted_at(mountinfo: str, at: str) -> tuple[str, str] | None:
    """File system, by number, and the path in it of what is mounted at that very path. A mount over another hides it, so the last
    one counts."""
    found = None
    for one in mounts_in(mountinfo):
        if one.at == at:
            found = one.device, one.root
    return found


def place_of(mountinfo: str, path: str) -> tuple[str, str] | None:
    """File system, by number, and the path in it of a path without links, seen from who has these mounts."""
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

    What a process says of itself, and so asked only where there are no mounts to go by, of processes of our own user: nobody
    else can bring a run over its limit by naming it.
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
    """Real user by the text of /proc/<pid>/status. The folder's owner is the effective one: root, for a program with the set-user-ID
    bit that anybody started."""
    for line in status.splitlines():
        if line.startswith("Uid:"):
            return int(line.split()[1])
    return None


def sees_grant(pid: int, grants: Path) -> bool | None:
    """Is any directory of the grants folder mounted where a process can see it? None = nobody can tell: it is gone, or the folder is nowhere."""
    mountinfo = mounts_of(pid)
    ours = place_of(_read("self", "mountinfo").decode(errors="replace"), os.path.realpath(grants))
    if not mountinfo or ours is None:
        return None
    return any(one.device == ours[0] and one.directory.rpartition("/")[0] == ours[1] for one in mounts_in(mountinfo))


def rejection_reason(pid: int, folder: str, key: str, *, mount_needed: bool, uid: str = "") -> str | None:
    """Why a process has no business at the socket of grant directory `key`; None when it has.

    With `mount_needed` that very directory must be mounted somewhere in its mount namespace, as the node does it for the container
    that the grant is for. The cgroup of a process that shows no grant must be of the pod `uid`. Of a process that it cannot see (pid 0) an arbiter
    knows nothing, and lets it be.
    """
    if pid == 0:
        return None
    mountinfo = mounts_of(pid)
    theirs = grant_in(mountinfo, folder)
    if theirs is not None and theirs != key:
        return f"this socket is another container's: yours is in {theirs}"
    in_pod = theirs is None and uid != "" and place(pid).pod == uid
    if mount_needed and not in_pod and not shows(mountinfo, folder, key):
        return f"process {pid} has no mount of grant {key}: this socket is for the container that has"
    return None


def shows(mountinfo: str, folder: str, key: str) -> bool:
    """Is this grant directory mounted, wherever? An image may have a link on the way, and a sandbox its own root."""
    return any(one.root == f"/{key}" or one.root.endswith(f"/{folder}/{key}") for one in mounts_in(mountinfo))


def kill(pid: int, started: int) -> bool:
    """End the process that had this pid and start. Answers whether it was still there."""
    try:
        handle = os.pidfd_open(pid)
    except OSError:
        return False
    try:
        if not started or started_at(pid) != started:
            return False
        signal.pidfd_send_signal(handle, signal.SIGKILL)
    except OSError:  # it is gone, or not ours to end
        return False
    finally:
        os.close(handle)
    return True


def kill_all(at: Place) -> int:
    """End every process of a container, by its cgroup, and those that they start meanwhile. Answers how many were there."""
    passed, ended = set[int](), 0
    for _ in range(KILL_LOOKS):
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
    """Where /proc shows what the threads of a process share. Of the first thread, once that has ended, the kernel shows no mounts, and with version 1
    of cgroups the root's: then it is another thread."""
    if not _has_ended(pid):
        return pid
    return next((thread for thread in _all_threads(pid) if not _has_ended(thread)), pid)


def _has_ended(thread: int | str) -> bool:
    stat = process_stat(_read(thread, "stat"))
    return stat is not None and stat.ended


def _threads(pid: int, name: str) -> list[str]:
    """Folders in /proc of its threads that are called so."""
    named = (thread for thread in _all_threads(pid) if _read(thread, "comm") == f"{name}\n".encode())
    return list(itertools.islice(named, NAMED_LOOKED_AT))


def _all_threads(pid: int) -> list[str]:
    """Folders in /proc of its first `THREADS_LOOKED_AT` threads."""
    try:
        with os.scandir(f"/proc/{pid}/task") as entries:
            return [f"{pid}/task/{entry.name}" for entry in itertools.islice(entries, THREADS_LOOKED_AT)]
    except OSError:
        return []


def _read(pid: int | str, name: str) -> bytes:
    # `Path.read_bytes` takes three calls more, and this is asked of each process each second
    try:
        descriptor = os.open(f"/proc/{pid}/{name}", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return b""
    content = b""
    try:
        # less than that is not the end: the kernel answers in parts
        while len(content) < READ_BYTES and (part := os.read(descriptor, 65536)):
            content += part
    except OSError:
        return b""
    finally:
        os.close(descriptor)
    return content

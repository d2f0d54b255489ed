"""Which runs there are. A run is a directory under `grants`, and it is there for as long as one of its processes.

A run's process is its command or any other that was started with its grant (children of a command that has ended). So nothing has
to be reported when a run ends, kill -9 included: the next program that lists the runs (the keeper, twice a second) removes the directory.

Everything here wants `StateRoot.locked`.
"""

from __future__ import annotations

import os
import pwd
import re
import secrets
import shutil
import stat
import time
from contextlib import suppress
from pathlib import Path
from typing import Final

import msgspec

from tangramctl.machine import StateRoot
from tangramctl.proc import boot_id, carried, start_ticks
from vgpu.api.burst import BurstLimits, burst_to_text
from vgpu.api.codec import grant_from_text, grant_to_text
from vgpu.api.contract import BURST
from vgpu.api.errors import BadDocument
from vgpu.api.grant import AssignedGpu, Grant, GrantGpu

VERSION: Final = 1
NAMESPACE: Final = "tangramctl"
"""In place of a pod's namespace in a grant."""


class Run(msgspec.Struct, frozen=True, rename={"service_class": "class"}):
    """One run, by its directory's run.json."""

    key: str
    """Name of its directory."""
    pid: int
    """Of the command: the process that was tangramctl becomes it."""
    start_ticks: int
    boot: str
    user: str
    command: tuple[str, ...]
    started_unix: int
    uuid: str
    index: int
    """Of the GPU, as NVML counts."""
    model: str
    mib: int
    core_percent: int
    service_class: str
    level: int
    version: int = VERSION

    @property
    def name(self) -> str:
        """The command line, as `ps` shows it."""
        return "".join(c if c.isprintable() else "?" for c in " ".join(self.command))

    @property
    def assigned(self) -> AssignedGpu:
        """What it has of its GPU."""
        return AssignedGpu(self.uuid, self.index, self.mib, self.core_percent)


class UnreadableRun(Run, frozen=True):
    """A run whose run.json is lost or cannot be read: its shares are those of its grant, until its process and all that carry its grant have ended."""

    why: str = ""


class RunTerms(msgspec.Struct, frozen=True):
    """What a run was given beside its share."""

    service_class: str
    level: int
    clear: bool
    model: str
    burst: BurstLimits | None = None
    """What it may use above its slice; None = nothing."""


def runs(machine: StateRoot) -> list[Run]:
    """The runs that live, oldest first. Directories of those that do not are taken away; what is no directory is not ours."""
    found = []
    for folder in machine.grants.iterdir():
        if not stat.S_ISDIR(folder.lstat().st_mode):
            continue
        run = None if folder.name.startswith(".") else _read(machine, folder.name)
        if run is None:  # torn in the making, which happens under this lock, or in being taken away
            _remove(folder)
        else:
            found.append(run)
    here = boot_id()
    ended = {run.key for run in found if run.boot != here or start_ticks(run.pid) != run.start_ticks}
    still = carried({str(machine.grant(run.key)) for run in found if run.key in ended and run.boot == here})
    for run in found:
        if run.key in ended and str(machine.grant(run.key)) not in still:
            _remove(machine.grants / run.key)
            ended.discard(run.key)
            found = [other for other in found if other.key != run.key]
    return sorted(found, key=lambda run: (run.started_unix, run.start_ticks, run.key))


def _remove(folder: Path) -> None:
    """The grant first: what a kill in the middle leaves differs from a run whose run.json is lost."""
    with suppress(OSError):
        (folder / "grant").unlink()
    shutil.rmtree(folder)


def _read(machine: StateRoot, key: str) -> Run | None:
    """None where there is neither run.json nor a grant."""
    path = machine.grants / key / "run.json"
    try:
        run = msgspec.json.decode(path.read_bytes(), type=Run)
    except OSError as error:
        if isinstance(error, FileNotFoundError) and not machine.grant(key).exists():
            return None
        return _unread(machine, key, f"{path} cannot be read: {error.strerror}")
    except msgspec.MsgspecError as error:
        return _unread(machine, key, f"{path} cannot be read: {error}")
    if run.key != key:
        return _unread(machine, key, f"{path} is of the run {run.key[:80]!r}")
    if run.version > VERSION:
        return _unread(
            machine, key, f"{path} is of version {run.version}: this tangramctl reads up to version {VERSION}"
        )
    return run


def _unread(machine: StateRoot, key: str, why: str) -> UnreadableRun:
    """The run by its grant; if that cannot be read either, it counts as using nothing."""
    path = machine.grant(key)
    try:
        grant = grant_from_text(path.read_text())
    except (OSError, UnicodeDecodeError, BadDocument) as error:
        why += f"; nor can its grant ({error}), so what it has is not known"
        grant = Grant(NAMESPACE, "run-0", key, "run", (GrantGpu("", 0),))
    (gpu, *_) = grant.gpus
    pid = int(grant.pod.removeprefix("run-")) if re.fullmatch("run-[0-9]{1,9}", grant.pod) else 0
    about = path.parent.stat()
    return UnreadableRun(
        key=key, pid=pid, start_ticks=start_ticks(pid) or 0, boot=boot_id(), user=_user(about.st_uid), command=("?",),
        started_unix=int(about.st_mtime), uuid=gpu.uuid, index=-1, model="", mib=gpu.mib, core_percent=gpu.core_percent,
        service_class=grant.service_class, level=grant.level, why=f"{why}; when nothing runs in it any more, remove that folder",
    )  # fmt: skip


def write(machine: StateRoot, command: tuple[str, ...], assigned: AssignedGpu, terms: RunTerms) -> Run:
    """Grant a share to this process and what it becomes. The directory appears whole."""
    key = secrets.token_hex(8)
    pid = os.getpid()
    readable = tuple(os.fsencode(word).decode(errors="replace") for word in command)
    run = Run(
        key=key, pid=pid, start_ticks=start_ticks(pid) or 0, boot=boot_id(), user=_user(os.geteuid()), command=readable, started_unix=int(time.time()),
        uuid=assigned.uuid, index=assigned.index, model=terms.model, mib=assigned.mib, core_percent=assigned.core_percent,
        service_class=terms.service_class, level=terms.level,
    )  # fmt: skip
    gpu = GrantGpu(assigned.uuid, assigned.mib, assigned.core_percent)
    grant = Grant(NAMESPACE, f"run-{pid}", key, "run", (gpu,), terms.service_class, terms.level, clear=terms.clear)
    fresh = machine.grants / f".{key}"
    fresh.mkdir(mode=0o755)
    try:
        fresh.chmod(0o755)  # whatever the umask: a command that drops its rights reaches its socket
        (fresh / "grant").write_text(grant_to_text(grant))
        (fresh / "grant").chmod(0o444)
        if terms.burst is not None:
            (fresh / BURST).write_text(burst_to_text(terms.burst))
            (fresh / BURST).chmod(0o444)
        (fresh / "run.json").write_bytes(msgspec.json.encode(run))
        fresh.rename(machine.grants / key)
    except OSError:
        shutil.rmtree(fresh)
        raise
    return run


def _user(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)

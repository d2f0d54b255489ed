"""Which runs there are. A run is a directory under `grants`, and it is there for as long as one of its processes.

A run's process is its command or any other that was started with its grant (children of a command that has ended). So nothing has
to be told when a run ends, kill -9 included: whoever looks next, the keeper twice a second, takes the directory away.

Everything here wants `Machine.locked`.
"""

from __future__ import annotations

import os
import pwd
import secrets
import shutil
import time
from typing import Final

import msgspec

from tangramctl.errors import Broken
from tangramctl.machine import Machine
from tangramctl.proc import boot_id, carried, start_ticks
from vgpu.codec import grant_to_text
from vgpu.grant import Grant, GrantCard, Slice

VERSION: Final = 1
NAMESPACE: Final = "tangramctl"
"""Stands where a pod's namespace stands in a grant."""


class Run(msgspec.Struct, frozen=True, rename={"klass": "class"}):
    """One run, as its directory's run.json says."""

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
    """Of the card, as NVML counts."""
    model: str
    mib: int
    core_percent: int
    klass: str
    level: int
    version: int = VERSION

    @property
    def name(self) -> str:
        """The command line, as `ps` shows it."""
        return "".join(c if c.isprintable() else "?" for c in " ".join(self.command))

    @property
    def piece(self) -> Slice:
        """What it holds of its card."""
        return Slice(self.uuid, self.index, self.mib, self.core_percent)


class Terms(msgspec.Struct, frozen=True):
    """What a run was given beside its slice."""

    klass: str
    level: int
    clear: bool
    model: str


def runs(machine: Machine) -> list[Run]:
    """The runs that live, oldest first. Directories of those that do not are taken away."""
    found = []
    for folder in machine.grants.iterdir():
        run = None if folder.name.startswith(".") else _read(machine, folder.name)
        if run is None:  # torn in the making, which happens under this lock, or in being taken away
            shutil.rmtree(folder)
        else:
            found.append(run)
    here = boot_id()
    ended = {run.key for run in found if run.boot != here or start_ticks(run.pid) != run.start_ticks}
    still = carried({str(machine.grant(run.key)) for run in found if run.key in ended and run.boot == here})
    for run in found:
        if run.key in ended and str(machine.grant(run.key)) not in still:
            shutil.rmtree(machine.grants / run.key)
            ended.discard(run.key)
            found = [other for other in found if other.key != run.key]
    return sorted(found, key=lambda run: (run.started_unix, run.key))


def _read(machine: Machine, key: str) -> Run | None:
    path = machine.grants / key / "run.json"
    try:
        run = msgspec.json.decode(path.read_bytes(), type=Run)
    except FileNotFoundError:
        return None
    except msgspec.MsgspecError as error:
        raise Broken(f"{path} cannot be read: {error}; when nothing runs any more, remove that folder") from None
    if run.version > VERSION:
        raise Broken(f"{path} is of version {run.version}: this tangramctl reads up to version {VERSION}")
    return run


def write(machine: Machine, command: tuple[str, ...], piece: Slice, terms: Terms) -> Run:
    """Grant a slice to this process and what it becomes. The directory appears whole."""
    key = secrets.token_hex(8)
    pid = os.getpid()
    run = Run(
        key=key, pid=pid, start_ticks=start_ticks(pid) or 0, boot=boot_id(), user=_user(), command=command, started_unix=int(time.time()),
        uuid=piece.uuid, index=piece.index, model=terms.model, mib=piece.mib, core_percent=piece.core_percent,
        klass=terms.klass, level=terms.level,
    )  # fmt: skip
    card = GrantCard(piece.uuid, piece.mib, piece.core_percent)
    grant = Grant(NAMESPACE, f"run-{pid}", key, "run", (card,), terms.klass, terms.level, clear=terms.clear)
    fresh = machine.grants / f".{key}"
    fresh.mkdir(mode=0o755)
    fresh.chmod(0o755)  # whatever the umask: a command that drops its rights reaches its socket
    (fresh / "grant").write_text(grant_to_text(grant))
    (fresh / "grant").chmod(0o444)
    (fresh / "run.json").write_bytes(msgspec.json.encode(run))
    fresh.rename(machine.grants / key)
    return run


def _user() -> str:
    try:
        return pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        return str(os.geteuid())

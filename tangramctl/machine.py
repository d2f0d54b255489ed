"""One state root: the runs of one machine, or of one user on it, and of one driver.

    ROOT/lock              locked while the records are read and changed
    ROOT/keeper.lock       held by the keeper for as long as it lives
    ROOT/children.lock     held by the keeper, its arbiter and its driver, for as long as one of them lives
    ROOT/wanted.lock       held by each run that is being started: the keeper stays meanwhile
    ROOT/keeper.json       its pid and the arbiter's
    ROOT/arbiter.log       what both logged
    ROOT/status.sock       the arbiter's status socket
    ROOT/grants/KEY/       one run: grant, run.json, arbiter.sock
    ROOT/fake/DIGEST/      a state root like this one for each description given to --fake, with driver.sock

Root's is /run/tangramctl. Another user's is $XDG_RUNTIME_DIR/tangramctl, or /tmp/tangramctl-UID where a session has none.
"""

from __future__ import annotations

import fcntl
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tangramctl.errors import Broken

SOCKET_PATH_LIMIT: Final = 107
"""Characters of a unix socket's path. Specified by Linux (sun_path)."""
DRIVER_LISTS: Final = frozenset({"LD_LIBRARY_PATH", "LD_PRELOAD"})
"""The values in `driver_env` are put before the existing ones."""
FAKE_KERNEL: Final = "libfake-kernel.so"
"""The kernel's side of the fake driver: channels that can be stopped."""
GRANTS_MODE: Final = 0o711
"""Opened by name, and listed by its owner alone."""
_LONGEST_BELOW: Final = len("/fake/0123456789ab/grants/0123456789abcdef/.arbiter.sock.new")


@dataclass(frozen=True, slots=True)
class StateRoot:
    """The paths of one state root."""

    root: Path
    programs: Path | None = None
    """Folder with the fake driver; None on the real one."""

    @property
    def grants(self) -> Path:
        return self.root / "grants"

    @property
    def status_socket(self) -> Path:
        return self.root / "status.sock"

    @property
    def keeper_lock(self) -> Path:
        return self.root / "keeper.lock"

    @property
    def children_lock(self) -> Path:
        return self.root / "children.lock"

    @property
    def wanted_lock(self) -> Path:
        return self.root / "wanted.lock"

    @property
    def keeper_file(self) -> Path:
        return self.root / "keeper.json"

    @property
    def log(self) -> Path:
        return self.root / "arbiter.log"

    @property
    def trouble(self) -> Path:
        """Why the keeper gave up."""
        return self.root / "trouble"

    @property
    def driver_socket(self) -> Path:
        return self.root / "driver.sock"

    @property
    def driver_config(self) -> Path:
        return self.root / "driver.conf"

    @property
    def copier_file(self) -> Path:
        """The copier's program and the size of a host pool, once a run that may burst has named them."""
        return self.root / "copier"

    def copier(self) -> tuple[Path, int] | None:
        """The program, and the MiB of a GPU's host pool; 0 = as the limits are. None where no copier was found: then no run gets memory above its guarantee."""
        try:
            program, mib = self.copier_file.read_text().splitlines()
            return Path(program), int(mib)
        except (OSError, ValueError):  # a text that is not UTF-8 is a ValueError, too
            return None

    def grant(self, key: str) -> Path:
        return self.grants / key / "grant"

    def driver_env(self) -> dict[str, str]:
        """What a program needs in its environment to meet the fake driver; nothing for the real one. Lists, by colons, are in
        `DRIVER_LISTS`."""
        if self.programs is None:
            return {}
        return {
            "TANGRAM_FAKE_DRIVER": str(self.driver_socket),
            "LD_LIBRARY_PATH": str(self.programs),
            "LD_PRELOAD": str(self.programs / FAKE_KERNEL),
        }

    @contextmanager
    def locked(self) -> Iterator[None]:
        """No other process reads or changes the record inside."""
        with held(self.root / "lock", fcntl.LOCK_EX):
            yield


def restrict_umask() -> int:
    """Only this user may write what the process creates from now on, whatever the umask. Returns the umask before."""
    before = os.umask(0o022)
    os.umask(before | 0o022)
    return before


def default_root() -> Path:
    """Where this user's state belongs."""
    if os.geteuid() == 0:
        return Path("/run/tangramctl")
    session = os.environ.get("XDG_RUNTIME_DIR", "")
    if session and Path(session).is_dir() and os.access(session, os.W_OK):
        return Path(session) / "tangramctl"
    return Path(f"/tmp/tangramctl-{os.geteuid()}")  # noqa: S108  made with mode 0700 and checked for its owner


def prepared(root: Path) -> StateRoot:
    """The state root, made when it is not there. Raises Broken when another user has put something in its place."""
    root = root.absolute()
    if len(str(root)) + _LONGEST_BELOW > SOCKET_PATH_LIMIT:
        most = SOCKET_PATH_LIMIT - _LONGEST_BELOW
        raise Broken(
            f"state folder {root} has {len(str(root))} characters: it must have 1 to {most}, as sockets lie below it"
        )
    make(root)
    return StateRoot(root)


def found(root: Path) -> StateRoot | None:
    """The state root, where it is there already: a command that only reads leaves nothing behind, and needs no right to write."""
    root = root.absolute()
    if not (root / "grants").is_dir():
        return None
    _check(root)
    return StateRoot(root)


def make(root: Path) -> None:
    """The folders of a state root. A command of root that drops its rights must reach root's folders; a user's are private.

    No other user may list the grants: the arbiter serves any process that knows the name of a run, which is 64 random bits.
    """
    mode = 0o755 if os.geteuid() == 0 else 0o700
    try:
        root.mkdir(mode=mode, parents=True, exist_ok=True)
        _check(root)
        grants = root / "grants"
        grants.mkdir(mode=GRANTS_MODE, exist_ok=True)
        if stat.S_IMODE(grants.stat().st_mode) != GRANTS_MODE:  # the umask, or an earlier version
            grants.chmod(GRANTS_MODE)
    except OSError as error:
        raise Broken(f"state folder {root} cannot be made: {error.strerror}") from None


def _check(root: Path) -> None:
    there = root.lstat()
    if not stat.S_ISDIR(there.st_mode) or there.st_uid != os.geteuid() or there.st_mode & 0o022:
        raise Broken(
            f"state folder {root} belongs to user {there.st_uid} with mode {stat.S_IMODE(there.st_mode):o}: "
            f"it must be a folder of user {os.geteuid()} that no other user may write"
        )


@contextmanager
def held(path: Path, how: int) -> Iterator[None]:
    """The file's lock, waited for."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, how)
        yield
    finally:
        os.close(fd)


def try_lock(path: Path) -> int | None:
    """A descriptor with the file's lock, or None while another process has it."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        return None
    return fd

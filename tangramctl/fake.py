"""A machine of its own for each description given to --fake: runs with the same file and text share its GPUs."""

from __future__ import annotations

import errno
import hashlib
import stat
from pathlib import Path
from typing import Final

from tangramctl.errors import BadOption
from tangramctl.machine import StateRoot, make

LARGEST_BYTES: Final = 64 * 1024


def faked(machine: StateRoot, file: Path, programs: Path) -> StateRoot:
    """The state root of this description, made when it is not there. Raises BadOption, Broken.

    It is found by the file's path and text: an edited file means new GPUs, and runs on the old ones keep theirs.
    """
    try:
        if not stat.S_ISREG(file.stat().st_mode):
            raise OSError(errno.EINVAL, "no regular file")  # to open a pipe waits for a writer
        with file.open("rb") as opened:
            text = opened.read(LARGEST_BYTES + 1)
    except OSError as error:
        raise BadOption(
            f"--fake is {file}: {error.strerror}; it must be a description of GPUs (docs/reference/fake-driver.md)"
        ) from None
    if len(text) > LARGEST_BYTES:
        raise BadOption(f"--fake is {file}, with more than {LARGEST_BYTES} bytes: it must be a description of GPUs")
    digest = hashlib.sha256(bytes(file.resolve()) + b"\0" + text).hexdigest()[:12]
    found = StateRoot(machine.root / "fake" / digest, programs)
    with machine.locked():
        make(machine.root / "fake")
        make(found.root)
        _write(found.driver_config, text)
        (found.root / "driver").mkdir(exist_ok=True)
        _point(found.root / "driver/lib", programs)
        _write(found.root / "description", bytes(file.resolve()) + b"\n")
    return found


def all_of(machine: StateRoot | None) -> list[tuple[StateRoot, str | None]]:
    """This machine and every fake one that was made below it, with its description's path; nothing where there is none."""
    if machine is None:
        return []
    found: list[tuple[StateRoot, str | None]] = [(machine, None)]
    for root in sorted((machine.root / "fake").glob("[0-9a-f]*")):
        described, lib = root / "description", root / "driver/lib"
        if described.exists() and lib.is_symlink():
            found.append((StateRoot(root, lib.readlink()), described.read_bytes().decode(errors="replace").strip()))
    return found


def _write(path: Path, text: bytes) -> None:
    """Whole or not at all: a disk may be full."""
    if path.exists() and path.read_bytes() == text:
        return
    fresh = path.with_name(f".{path.name}.new")
    fresh.write_bytes(text)
    fresh.rename(path)


def _point(link: Path, target: Path) -> None:
    if not link.is_symlink() or link.readlink() != target:
        link.unlink(missing_ok=True)
        link.symlink_to(target)

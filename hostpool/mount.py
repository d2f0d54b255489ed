"""`python -m hostpool.mount FOLDER [--hugetlbfs]`: a file system for the pool in a folder of the node, which outlives every pod.

Mounts a tmpfs at FOLDER/tmpfs, with huge pages where the kernel has them, and with --hugetlbfs one of the node's reserved pages of 2 MiB at
FOLDER/hugetlbfs. What is mounted there already stays. Only root may look in. It runs in an init container whose mounts reach the node
(`mountPropagation: Bidirectional`); the container with the pool needs no right to mount.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final, NamedTuple

MOUNTINFO: Final = Path("/proc/self/mountinfo")
TMPFS: Final = ("huge=within_size,size=100%,mode=0700", "size=100%,mode=0700")
"""Options, the first that the kernel takes. The pool's program decides how much is used: 100 % is no promise."""
HUGETLBFS: Final = ("pagesize=2M,mode=0700",)
FLAGS: Final = 2 | 4 | 8  # MS_NOSUID, MS_NODEV, MS_NOEXEC
_libc: Final = ctypes.CDLL(None, use_errno=True)

Mount = Callable[[str, Path, str], None]


class MountPoint(NamedTuple):
    """One line of mountinfo (proc_pid_mountinfo(5))."""

    at: str
    kind: str
    shared: bool
    """A mount below it reaches other mount namespaces."""


def mounts(mountinfo: str) -> Iterator[MountPoint]:
    """In the order in which they were made."""
    for line in mountinfo.splitlines():
        fields = line.split(" ")
        if "-" in fields[6:]:
            end = fields.index("-", 6)
            yield MountPoint(fields[4], fields[end + 1], any(one.startswith("shared:") for one in fields[6:end]))


def is_shared(mountinfo: str, path: Path) -> bool:
    """Does a mount made at `path` reach the node?"""
    around = [one for one in mounts(mountinfo) if path.is_relative_to(one.at)]
    deepest = max((len(one.at) for one in around), default=0)
    return any(one.shared for one in around if len(one.at) == deepest)


def mount(kind: str, at: Path, options: str) -> None:
    """mount(2). Raises OSError."""
    if _libc.mount(kind.encode(), os.fsencode(at), kind.encode(), FLAGS, options.encode()):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def prepare(folder: Path, kinds: Sequence[str], *, mountinfo: Path = MOUNTINFO, mount: Mount = mount) -> list[str]:
    """Mount what is missing. Returns a sentence for each kind. Raises OSError."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return [_prepare(kind, folder / kind, mountinfo.read_text(), mount) for kind in kinds]


def _prepare(kind: str, at: Path, mountinfo: str, mount: Mount) -> str:
    there = [one.kind for one in mounts(mountinfo) if one.at == str(at)]
    if kind in there[-1:]:
        return f"{at} has a {kind}: it stays"
    if there:
        raise OSError(f"{at} has a {there[-1]}, not a {kind}: unmount it")
    if not is_shared(mountinfo, at):
        raise OSError(
            f"mounts at {at} do not reach the node: it must be below a shared mount, and the container have Bidirectional propagation"
        )
    if at.is_symlink():
        raise OSError(f"{at} is a link, not a folder")
    at.mkdir(mode=0o700, exist_ok=True)
    options = TMPFS if kind == "tmpfs" else HUGETLBFS
    for last, text in enumerate(options, 1 - len(options)):
        try:
            mount(kind, at, text)
        except OSError as error:
            if last == 0:
                raise OSError(f"a {kind} cannot be mounted at {at}: {error.strerror}") from None
            continue
        return f"{at} has a new {kind} ({text})"
    raise AssertionError("options are not empty")


def main(arguments: Sequence[str] | None = None) -> None:
    """Ends with status 1 and one line if something cannot be mounted."""
    parser = argparse.ArgumentParser(prog="hostpool.mount", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--hugetlbfs", action="store_true")
    given = parser.parse_args(arguments)
    try:
        print("\n".join(prepare(given.folder, ["tmpfs", *(["hugetlbfs"] if given.hugetlbfs else [])])))
    except OSError as error:
        sys.exit(f"hostpool.mount: {error}")


if __name__ == "__main__":
    main()

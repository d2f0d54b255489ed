"""Remove Tangram's files from this node, once the release is gone: `python -m deviceplugin.uninstall STATE_ROOT [FILE...]`.

Runs in a pod of its own, for the time of `helm uninstall`, with the processes of the node. A container with a grant has the library, its grant and the
arbiter's socket mounted from the state root: if there is one, everything stays, since the next process in it would not start. What a container has is read
from the mounts of its processes and not from files, which may be wrong.

Prints one line, a JSON object with one of: `removed` (paths), `kept` (pods, as namespace/name), `error` (a sentence). Then it waits for its end.
"""

from __future__ import annotations

import argparse
import ctypes
import errno
import json
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from vgpu.api.cgroup import depth_of, place_of
from vgpu.api.codec import grant_from_text
from vgpu.api.errors import BadDocument
from vgpu.api.mountinfo import FOLDER, MountInfo, mounts_in

WAIT_S: Final = 60.0
"""For the end of Tangram's own containers, which have 30 s for it. Guessed."""
LOOK_S: Final = 0.5
MNT_DETACH: Final = 2
UMOUNT_NOFOLLOW: Final = 8
"""Source: umount2(2)."""
MOST_GRANT_BYTES: Final = 65_536
"""Of a grant file. Larger ones are not read: the pod is then named by its grant."""
_libc: Final = ctypes.CDLL(None, use_errno=True)


def unmount(at: str) -> None:
    """umount2(2). Raises OSError."""
    if _libc.umount2(os.fsencode(at), MNT_DETACH | UMOUNT_NOFOLLOW):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), at)


@dataclass(frozen=True, slots=True)
class Node:
    """What is seen of a node. `state_root`: as it is mounted here, below a mount of its parent folder."""

    state_root: Path
    proc: Path = Path("/proc")
    unmount: Callable[[str], None] = unmount
    sleep: Callable[[float], None] = time.sleep
    clock: Callable[[], float] = time.monotonic
    own: Path = Path("/proc/self")

    def mounts(self) -> list[MountInfo]:
        """Of this process."""
        return list(mounts_in((self.own / "mountinfo").read_text()))

    def source(self) -> tuple[str, str]:
        """The file system of the state root, by its number, and the state root's path in it."""
        around = [one for one in self.mounts() if self.state_root.is_relative_to(one.at)]
        if not around:
            raise OSError(f"{self.state_root} is in no mount of this container")
        deepest = max(around, key=lambda one: len(one.at))  # of several at one place the last covers the others
        last = [one for one in around if one.at == deepest.at][-1]
        return last.device, str(Path(last.root) / self.state_root.relative_to(last.at))

    def mounted(self) -> tuple[set[str], set[str]]:
        """What other containers have mounted of the state root: names of grants, and of the folders that Tangram's own containers have."""
        device, root = self.source()
        grants: set[str] = set()
        own: set[str] = set()
        for mounts in self._of_other_containers():
            inside = [
                Path(one.directory).relative_to(root).parts
                for one in mounts
                if one.device == device and Path(one.directory).is_relative_to(root)
            ]
            granted = {parts[1] for parts in inside if parts[:1] == (FOLDER,) and len(parts) > 1}
            grants |= granted
            if not granted:
                own |= {"/".join(parts) for parts in inside}
        return grants, own

    def _of_other_containers(self) -> Iterator[list[MountInfo]]:
        """Of each mount namespace of a pod, once. A namespace of the node's own may have the state root mounted, where that is a file system."""
        depth = depth_of((self.own / "cgroup").read_text())
        seen = {(self.own / "mountinfo").read_text()}
        for process in self.proc.glob("[0-9]*"):
            try:
                in_pod = place_of((process / "cgroup").read_text(), depth).pod
                text = (process / "mountinfo").read_text() if in_pod else ""
            except OSError:  # it ended meanwhile
                continue
            if text not in seen:
                seen.add(text)
                yield list(mounts_in(text))


def pods_of(node: Node, grants: Iterable[str]) -> list[str]:
    """Namespace and name of each pod; of one whose grant cannot be read, the name of the grant."""
    return sorted({_pod(node.state_root / FOLDER / key / "grant") or f"grant {key}" for key in grants})


def _pod(file: Path) -> str:
    try:
        if file.stat().st_size > MOST_GRANT_BYTES:
            return ""
        grant = grant_from_text(file.read_text())
    except (OSError, UnicodeDecodeError, BadDocument):
        return ""
    return f"{grant.namespace}/{grant.pod}"


def clean(node: Node, files: Sequence[Path]) -> Mapping[str, object]:
    """Remove the state root and the files, or nothing. Returns what is printed."""
    end_s = node.clock() + WAIT_S
    while True:
        grants, own = node.mounted()
        if grants:
            return {"kept": pods_of(node, grants)}
        if not own:
            break
        if node.clock() >= end_s:
            return {"error": f"containers of Tangram have {', '.join(sorted(own))} of {node.state_root} mounted still"}
        node.sleep(LOOK_S)
    below = [one.at for one in node.mounts() if node.state_root in Path(one.at).parents]
    for at in sorted(below, key=len, reverse=True):
        node.unmount(at)
    return {"removed": [str(path) for path in (node.state_root, *files) if _removed(path)]}


def _removed(path: Path) -> bool:
    """Was it there? Of a folder that is a mount of its own, the folder stays, empty. Raises OSError for what cannot be removed."""
    if not path.is_dir():
        there = path.is_symlink() or path.exists()
        path.unlink(missing_ok=True)
        return there
    for child in path.iterdir():
        if child.is_dir() and not child.is_symlink():
            shutil.rmtree(child)
        else:
            child.unlink()
    try:
        path.rmdir()
    except OSError as error:
        if error.errno != errno.EBUSY:
            raise
    return True


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="deviceplugin.uninstall", description=(__doc__ or "").partition(":")[0])
    parser.add_argument(
        "state_root", type=Path, help="the folder with Tangram's state on the node, as it is mounted here"
    )
    parser.add_argument("files", type=Path, nargs="*", help="further files to remove")
    given = parser.parse_args(arguments)
    over = {signal.SIGTERM, signal.SIGINT}
    signal.pthread_sigmask(signal.SIG_BLOCK, over)
    try:
        result = clean(Node(given.state_root), given.files)
    except OSError as error:
        result = {"error": str(error)}
    print(json.dumps(result), flush=True)
    signal.sigwait(over)


if __name__ == "__main__":
    main()

"""The pool's file systems are mounted once, with huge pages where the kernel has them, and only where the node sees them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from hostpool.mount import HUGETLBFS, TMPFS, is_shared, prepare

SHARED = "1 0 8:1 / / rw shared:1 - ext4 /dev/sda rw\n"
PRIVATE = "1 0 8:1 / / rw - ext4 /dev/sda rw\n"


class Node:
    """A mount table, and mounts that are made in it unless refused."""

    def __init__(self, tmp_path: Path, table: str = SHARED, refuse: tuple[str, ...] = ()) -> None:
        self.folder, self.table = tmp_path / "pool", tmp_path / "mountinfo"
        self.table.write_text(table)
        self.refuse, self.made = refuse, list[tuple[str, str, str]]()

    def mount(self, kind: str, at: Path, options: str) -> None:
        if options in self.refuse:
            raise OSError(22, "Invalid argument")
        self.made.append((kind, at.name, options))
        self.table.write_text(self.table.read_text() + f"2 1 0:9 / {at} rw shared:2 - {kind} none rw\n")

    def prepare(self, *kinds: str) -> list[str]:
        return prepare(self.folder, kinds, mountinfo=self.table, mount=self.mount)


def test_what_is_missing_is_mounted_once(tmp_path: Path) -> None:
    node = Node(tmp_path)
    node.prepare("tmpfs", "hugetlbfs")
    assert node.made == [("tmpfs", "tmpfs", TMPFS[0]), ("hugetlbfs", "hugetlbfs", HUGETLBFS[0])]
    assert node.folder.stat().st_mode & 0o777 == 0o700
    assert node.prepare("tmpfs") == [f"{node.folder}/tmpfs has a tmpfs: it stays"]
    assert len(node.made) == 2


def test_a_kernel_without_huge_pages_of_a_tmpfs_gets_one_without(tmp_path: Path) -> None:
    node = Node(tmp_path, refuse=TMPFS[:1])
    node.prepare("tmpfs")
    assert node.made == [("tmpfs", "tmpfs", TMPFS[1])]


@pytest.mark.parametrize("kind", ["tmpfs", "hugetlbfs"])
def test_a_mount_that_the_kernel_refuses_is_named(tmp_path: Path, kind: str) -> None:
    with pytest.raises(OSError, match=f"a {kind} cannot be mounted at .*: Invalid argument"):
        Node(tmp_path, refuse=TMPFS + HUGETLBFS).prepare(kind)


def test_a_mount_that_would_end_with_the_container_is_refused(tmp_path: Path) -> None:
    node = Node(tmp_path, PRIVATE)
    with pytest.raises(OSError, match="do not reach the node"):
        node.prepare("tmpfs")
    node = Node(tmp_path, SHARED + f"2 1 8:2 / {tmp_path} rw - ext4 /dev/sdb rw\n")
    with pytest.raises(OSError, match="do not reach the node"):
        node.prepare("tmpfs")
    assert node.made == []


def test_another_file_system_or_a_link_in_its_place_is_refused(tmp_path: Path) -> None:
    node = Node(tmp_path)
    node.table.write_text(SHARED + f"2 1 8:2 / {node.folder}/tmpfs rw shared:3 - ext4 /dev/sdb rw\n")
    with pytest.raises(OSError, match="has a ext4, not a tmpfs"):
        node.prepare("tmpfs")
    node = Node(tmp_path)
    node.folder.mkdir(exist_ok=True)
    (node.folder / "tmpfs").symlink_to(tmp_path)
    with pytest.raises(OSError, match="is a link"):
        node.prepare("tmpfs")


def test_the_deepest_mount_decides_and_the_last_of_several_at_one_place() -> None:
    table = SHARED + "2 1 8:2 / /var rw - ext4 /dev/sdb rw\nshort line\n"
    assert is_shared(table, Path("/etc/x"))
    assert not is_shared(table, Path("/var/x"))
    assert not is_shared("", Path("/"))


IN_A_NAMESPACE = """
set -e
mount --make-rshared /
"$0" -P -m hostpool.mount "$1"
echo kept > "$1/tmpfs/file"
"$0" -P -m hostpool.mount "$1"
cat "$1/tmpfs/file"
stat -f -c %T "$1/tmpfs"
stat -c %a "$1/tmpfs"
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_the_program_mounts_a_tmpfs_that_stays(tmp_path: Path) -> None:
    done = subprocess.run(
        ["unshare", "--mount", "--propagation", "private", "sh", "-c", IN_A_NAMESPACE, sys.executable, str(tmp_path / "pool")],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    first, again, *rest = done.stdout.splitlines()
    assert "has a new tmpfs" in first
    assert again.endswith("it stays")
    assert rest == ["kept", "tmpfs", "700"]


def test_the_program_says_in_one_line_what_is_wrong(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    words = [sys.executable, "-P", "-m", "hostpool.mount", str(tmp_path / "file/pool")]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    assert done.stderr.startswith("hostpool.mount: ")

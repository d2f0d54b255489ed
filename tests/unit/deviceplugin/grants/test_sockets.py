"""The way of a container to the arbiter's socket: of one that was allocated now, and of one that an earlier plugin made."""

from __future__ import annotations

import os
import shutil
import socket
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from tempfile import mkdtemp

import pytest
from structlog.testing import capture_logs

from deviceplugin.admission import listens
from deviceplugin.grants.allocation_record import Record
from deviceplugin.grants.grant_directories import GrantDirectories
from tests.unit.deviceplugin.builders import uuid
from vgpu.api.contract import grant_key, mounts

IDS = (f"{uuid(0)}-0",)


@pytest.fixture
def short_path() -> Iterator[Path]:
    """A socket's path has at most 107 characters."""
    path = Path(mkdtemp(prefix="sockets-"))
    yield path
    shutil.rmtree(path)


@pytest.fixture
def grants(short_path: Path) -> GrantDirectories:
    (short_path / "image.so").write_bytes(b"version 1")
    made = GrantDirectories(short_path / "state", short_path / "image.so")
    made.install()
    return made


def record(pod: str = "a") -> Record:
    return Record(IDS, f"uid-{pod}", "default", pod, "main", (uuid(0),), 0.0, 0)


def listening(path: Path) -> socket.socket:
    """As the arbiter: a new socket under this name."""
    path.parent.mkdir(exist_ok=True)
    made = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    beside = path.with_name(".new")
    beside.unlink(missing_ok=True)
    made.bind(str(beside))
    made.listen(16)
    beside.rename(path)
    return made


def of_earlier(grants: GrantDirectories) -> Path:
    """The directory of a container that runs since before the upgrade."""
    folder = grants.folder(grant_key(IDS))
    folder.mkdir()
    (folder / "libtangram.so").hardlink_to(grants.install())
    return folder


def test_a_container_finds_the_socket_behind_its_two_mounts(grants: GrantDirectories, short_path: Path) -> None:
    key = grants.prepare(record())
    state = short_path / "state"
    whole, sock, _ = mounts(str(state), key)
    assert (whole.host, sock.host) == (str(grants.folder(key)), str(grants.socket(key).parent))
    with closing(listening(grants.socket(key))):
        container = short_path / "container"  # a mount over `socket` does what this link does
        shutil.copytree(grants.folder(key), container, symlinks=True)
        (container / "socket").rmdir()
        (container / "socket").symlink_to(sock.host)
        assert listens(container / "arbiter.sock")
        assert not listens(grants.folder(key) / "arbiter.sock"), "the grant directory itself has no socket"


def test_a_container_of_an_earlier_plugin_finds_each_new_socket_of_the_arbiter_at_its_path(
    grants: GrantDirectories,
) -> None:
    folder = of_earlier(grants)
    assert grants.sockets.link_earlier(), "there is one"
    for _ in range(2):  # the arbiter, and one that was started after it
        with closing(listening(grants.socket(folder.name))):
            assert not listens(folder / "arbiter.sock")
            assert grants.sockets.link_earlier()
            assert listens(folder / "arbiter.sock")
            inode = (folder / "arbiter.sock").lstat().st_ino
            assert grants.sockets.link_earlier()
            assert (folder / "arbiter.sock").lstat().st_ino == inode
    assert grants.restore(folder.name) == []
    assert not (folder / "socket").exists(), "its container has no mount there"


async def test_no_socket_is_searched_for_where_no_earlier_plugin_made_a_directory(grants: GrantDirectories) -> None:
    grants.prepare(record())
    await grants.sockets.run()


def test_an_arbiter_of_before_that_came_back_for_a_while_leaves_nothing_in_the_way(
    grants: GrantDirectories, short_path: Path
) -> None:
    key = grants.prepare(record())
    link = grants.folder(key) / "arbiter.sock"
    with closing(listening(link)):  # in place of the link, as it does in every grant directory
        assert link.is_socket()
    GrantDirectories(short_path / "state", short_path / "image.so").install()
    assert str(link.readlink()) == "socket/arbiter.sock"


def test_what_is_missing_is_restored(grants: GrantDirectories) -> None:
    key = grants.prepare(record())
    shutil.rmtree(grants.socket(key).parent)
    (grants.folder(key) / "arbiter.sock").unlink()
    assert grants.restore(key) == [str(grants.socket(key).parent), "arbiter.sock"]
    assert grants.restore(key) == []
    shutil.rmtree(grants.folder(key))
    assert grants.restore(key) == [str(grants.folder(key)), "libtangram.so", "arbiter.sock"]


def test_folders_of_sockets_go_with_their_allocations(grants: GrantDirectories) -> None:
    kept, old = grants.prepare(record("a")), grants.prepare(record("b"))
    begun = grants.socket("begun").parent
    begun.mkdir()
    os.utime(grants.folder(old), (1000, 1000))
    assert grants.collect({kept}, now=2000.0, older_than_s=300.0) == [old]
    assert [path.name for path in begun.parent.iterdir()] == [kept]


def test_a_link_in_place_of_a_folder_that_is_mounted_refuses_the_start(
    grants: GrantDirectories, short_path: Path
) -> None:
    key = grants.prepare(record())
    shutil.rmtree(grants.socket(key).parent)
    grants.socket(key).parent.symlink_to(short_path)
    with pytest.raises(NotADirectoryError, match=r"it must be a directory, for it is mounted into a container"):
        grants.restore(key)


def test_only_a_socket_is_put_at_the_path_of_an_older_container(grants: GrantDirectories, short_path: Path) -> None:
    folder = of_earlier(grants)
    grants.socket(folder.name).parent.mkdir()
    grants.socket(folder.name).write_bytes(b"no socket")
    with capture_logs() as logs:
        for _ in range(3):
            assert grants.sockets.link_earlier()
    (line,) = logs
    assert "is no socket" in line["error"]
    assert sorted(path.name for path in folder.iterdir()) == ["libtangram.so"]

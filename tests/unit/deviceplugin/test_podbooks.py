"""What each pod uses, on the disk: read back after a restart, a crash, a reboot and damage."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from structlog.testing import capture_logs

from deviceplugin import sealed
from deviceplugin.podbooks import PodBook, PodBooks
from tests.unit.deviceplugin.builders import uuid
from vgpu.grant import Slice
from vgpu.inventory import Orphan
from vgpu.names import DEFAULT

MEM, CORE = DEFAULT.gpu_mem, DEFAULT.gpu_core
HELD = (Slice(uuid(0), 0, 4096, 30), Slice(uuid(1), 1, 81920, 100, "whole"))


def book(uid: str = "uid-a", pod: str = "a", held: tuple[Slice, ...] = HELD) -> PodBook:
    return PodBook(uid, "default", pod, held)


def books(root: Path, boot: str = "boot") -> PodBooks:
    made = PodBooks(root, boot)
    made.load()
    return made


def test_what_is_entered_is_read_back_with_all_devices_so_far(tmp_path: Path) -> None:
    made = books(tmp_path)
    made.enter(book(), {MEM: ["x-1", "x-0"]})
    made.enter(book(), {CORE: ["x-7"], MEM: ["x-2"]})
    (again,) = books(tmp_path)
    assert again == made.get("uid-a")
    assert again.ids == {CORE: ("x-7",), MEM: ("x-0", "x-1", "x-2")}
    assert again.orphan == Orphan("uid-a", "default", "a", HELD)
    assert books(tmp_path).users(MEM)["x-1"] == "uid-a"
    assert "x-1" not in books(tmp_path).users(CORE)


def test_the_same_again_is_no_write(tmp_path: Path) -> None:
    made = books(tmp_path)
    made.enter(book(), {MEM: ["x-0"]})
    inode = (tmp_path / "pods/uid-a.json").stat().st_ino
    made.enter(book(), {MEM: ["x-0"]})
    assert (tmp_path / "pods/uid-a.json").stat().st_ino == inode
    (tmp_path / "pods/uid-a.json").unlink()  # somebody removed it
    made.enter(book(), {MEM: ["x-0"]})
    assert len(list(books(tmp_path))) == 1


def test_a_book_says_in_which_boot_its_pod_started_last(tmp_path: Path) -> None:
    books(tmp_path, "first").enter(book(), {})
    after = books(tmp_path, "second")
    assert [one.boot for one in after] == ["first"]
    after.enter(book(), {})
    assert [one.boot for one in books(tmp_path, "second")] == ["second"]


def test_the_file_of_a_pod_that_is_gone_is_that_of_the_next_one(tmp_path: Path) -> None:
    made = books(tmp_path)
    folder = tmp_path / "pods"
    assert [path.name for path in folder.iterdir()] == [".new"]
    made.enter(book("uid-a", "a-very-long-name" * 10), {MEM: ["x-0"]})
    inode = (folder / "uid-a.json").stat().st_ino
    made.forget(["uid-a"])
    assert [path.name for path in folder.iterdir()] == [".new"]
    assert [one.uid for one in books(tmp_path)] == [], "what is left in it is no book"
    made.enter(book("uid-b"), {MEM: ["x-1"]})
    assert (folder / "uid-b.json").stat().st_ino == inode
    assert [(one.uid, one.ids) for one in books(tmp_path)] == [("uid-b", {MEM: ("x-1",)})]


def test_what_is_forgotten_is_gone_and_so_are_its_devices(tmp_path: Path) -> None:
    made = books(tmp_path)
    made.enter(book(), {MEM: ["x-0"]})
    made.enter(book("uid-b", "b"), {MEM: ["x-0"]})  # the kubelet gave it on
    made.forget(["uid-a", "uid-never-there"])
    assert [one.uid for one in books(tmp_path)] == ["uid-b"]
    assert made.users(MEM)["x-0"] == "uid-b"


def test_a_uid_that_could_be_a_path_is_none(tmp_path: Path) -> None:
    made = books(tmp_path)
    made.enter(book("../../evil"), {})
    assert [path.parent for path in tmp_path.rglob("*.json")] == [tmp_path / "pods"]
    assert books(tmp_path).get("../../evil") is not None


GOOD = msgspec.to_builtins(book())
DAMAGE = {
    "empty": (b"", "has 0 bytes that are no book of a pod"),
    "truncated": (b'{"v":2,"sha256":"', "that are no book of a pod: Input data was truncated"),
    "corrupt": (b'{"v":2,"sha256":"0","body":{}}', "is damaged: its checksum is"),
    "of later": (b'{"v":3}', "is of version 3: this device plugin reads versions 2 to 2"),
}


@pytest.mark.parametrize(("content", "sentence"), DAMAGE.values(), ids=DAMAGE)
def test_a_book_that_cannot_be_read_is_told_kept_and_replaced_at_the_next_start_of_its_pod(
    tmp_path: Path, content: bytes, sentence: str
) -> None:
    books(tmp_path).enter(book(), {MEM: ["x-0"]})
    path = tmp_path / "pods/uid-a.json"
    path.write_bytes(content)
    with capture_logs() as logs:
        made = books(tmp_path)
    (said,) = logs
    assert sentence in said["error"]
    assert str(path) in said["error"]
    assert list(made) == []
    assert list(made.damaged) == ["uid-a.json"]
    made.enter(book(), {MEM: ["x-0"]})
    assert made.damaged == {}
    assert [one.uid for one in books(tmp_path)] == ["uid-a"]


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"uid": "uid-b"}, "is about pod UID uid-b"),
        ({"held": [{"uuid": "GPU-1", "index": 0, "mib": 1}]}, "is no GPU UUID"),
        ({"held": [{"uuid": uuid(0), "index": 0, "mib": -1}]}, "mib is -1: it must be 0 to"),
        ({"more": 1}, "unknown field `more`"),
    ],
)
def test_a_book_with_a_right_checksum_and_a_wrong_word_is_no_book(
    tmp_path: Path, change: dict[str, object], sentence: str
) -> None:
    (tmp_path / "pods").mkdir()
    sealed.write(tmp_path / "pods/uid-a.json", GOOD | change, durable=False)
    with capture_logs() as logs:
        assert list(books(tmp_path)) == []
    assert sentence in logs[0]["error"]

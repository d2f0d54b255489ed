"""What each pod uses, on the disk: read back after a restart, a crash, a reboot and damage."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from structlog.testing import capture_logs

from deviceplugin.grants import checked_file as sealed
from deviceplugin.pods.usage_records import UsageRecord, UsageRecords
from tests.unit.deviceplugin.builders import uuid
from vgpu.api.grant import AssignedGpu
from vgpu.api.inventory import Orphan
from vgpu.api.names import DEFAULT

MEM, CORE = DEFAULT.gpu_mem, DEFAULT.gpu_core
HELD = (AssignedGpu(uuid(0), 0, 4096, 30), AssignedGpu(uuid(1), 1, 81920, 100, "whole"))


def record(uid: str = "uid-a", pod: str = "a", held: tuple[AssignedGpu, ...] = HELD) -> UsageRecord:
    return UsageRecord(uid, "default", pod, held)


def records(root: Path, boot: str = "boot") -> UsageRecords:
    made = UsageRecords(root, boot)
    made.load()
    return made


def test_what_is_entered_is_read_back_with_all_devices_so_far(tmp_path: Path) -> None:
    made = records(tmp_path)
    made.enter(record(), {MEM: ["x-1", "x-0"]})
    made.enter(record(), {CORE: ["x-7"], MEM: ["x-2"]})
    (again,) = records(tmp_path)
    assert again == made.get("uid-a")
    assert again.ids == {CORE: ("x-7",), MEM: ("x-0", "x-1", "x-2")}
    assert again.orphan == Orphan("uid-a", "default", "a", HELD)
    assert records(tmp_path).users(MEM)["x-1"] == "uid-a"
    assert "x-1" not in records(tmp_path).users(CORE)


def test_the_same_again_is_no_write(tmp_path: Path) -> None:
    made = records(tmp_path)
    made.enter(record(), {MEM: ["x-0"]})
    inode = (tmp_path / "pods/uid-a.json").stat().st_ino
    made.enter(record(), {MEM: ["x-0"]})
    assert (tmp_path / "pods/uid-a.json").stat().st_ino == inode
    (tmp_path / "pods/uid-a.json").unlink()  # it was removed
    made.enter(record(), {MEM: ["x-0"]})
    assert len(list(records(tmp_path))) == 1


def test_a_record_has_the_boot_in_which_its_pod_started_last(tmp_path: Path) -> None:
    records(tmp_path, "first").enter(record(), {})
    after = records(tmp_path, "second")
    assert [one.boot for one in after] == ["first"]
    after.enter(record(), {})
    assert [one.boot for one in records(tmp_path, "second")] == ["second"]


def test_the_file_of_a_pod_that_is_gone_is_that_of_the_next_one(tmp_path: Path) -> None:
    made = records(tmp_path)
    folder = tmp_path / "pods"
    assert [path.name for path in folder.iterdir()] == [".new"]
    made.enter(record("uid-a", "a-very-long-name" * 10), {MEM: ["x-0"]})
    inode = (folder / "uid-a.json").stat().st_ino
    made.forget(["uid-a"])
    assert [path.name for path in folder.iterdir()] == [".new"]
    assert [one.uid for one in records(tmp_path)] == [], "what is left in it is no record"
    made.enter(record("uid-b"), {MEM: ["x-1"]})
    assert (folder / "uid-b.json").stat().st_ino == inode
    assert [(one.uid, one.ids) for one in records(tmp_path)] == [("uid-b", {MEM: ("x-1",)})]


def test_what_is_forgotten_is_gone_and_so_are_its_devices(tmp_path: Path) -> None:
    made = records(tmp_path)
    made.enter(record(), {MEM: ["x-0"]})
    made.enter(record("uid-b", "b"), {MEM: ["x-0"]})  # the kubelet gave it on
    made.forget(["uid-a", "uid-never-there"])
    assert [one.uid for one in records(tmp_path)] == ["uid-b"]
    assert made.users(MEM)["x-0"] == "uid-b"


def test_a_uid_that_could_be_a_path_is_none(tmp_path: Path) -> None:
    made = records(tmp_path)
    made.enter(record("../../evil"), {})
    assert [path.parent for path in tmp_path.rglob("*.json")] == [tmp_path / "pods"]
    assert records(tmp_path).get("../../evil") is not None


GOOD = msgspec.to_builtins(record())
DAMAGE = {
    "empty": (b"", "has 0 bytes that are no usage record of a pod"),
    "truncated": (b'{"v":2,"sha256":"', "that are no usage record of a pod: Input data was truncated"),
    "corrupt": (b'{"v":2,"sha256":"0","body":{}}', "is damaged: its checksum is"),
    "of later": (b'{"v":3}', "is of version 3: this device plugin reads versions 2 to 2"),
}


@pytest.mark.parametrize(("content", "sentence"), DAMAGE.values(), ids=DAMAGE)
def test_a_record_that_cannot_be_read_is_reported_kept_and_replaced_at_the_next_start_of_its_pod(
    tmp_path: Path, content: bytes, sentence: str
) -> None:
    records(tmp_path).enter(record(), {MEM: ["x-0"]})
    path = tmp_path / "pods/uid-a.json"
    path.write_bytes(content)
    with capture_logs() as logs:
        made = records(tmp_path)
    (line,) = logs
    assert sentence in line["error"]
    assert str(path) in line["error"]
    assert list(made) == []
    assert list(made.damaged) == ["uid-a.json"]
    made.enter(record(), {MEM: ["x-0"]})
    assert made.damaged == {}
    assert [one.uid for one in records(tmp_path)] == ["uid-a"]


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"uid": "uid-b"}, "is about pod UID uid-b"),
        ({"held": [{"uuid": "GPU-1", "index": 0, "mib": 1}]}, "is no GPU UUID"),
        ({"held": [{"uuid": uuid(0), "index": 0, "mib": -1}]}, "mib is -1: it must be 0 to"),
        ({"more": 1}, "unknown field `more`"),
    ],
)
def test_a_record_with_a_right_checksum_and_a_wrong_word_is_no_record(
    tmp_path: Path, change: dict[str, object], sentence: str
) -> None:
    (tmp_path / "pods").mkdir()
    sealed.write(tmp_path / "pods/uid-a.json", GOOD | change, durable=False)
    with capture_logs() as logs:
        assert list(records(tmp_path)) == []
    assert sentence in logs[0]["error"]

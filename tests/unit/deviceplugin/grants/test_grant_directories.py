"""The state folder: what containers mount, and the record of it."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from deviceplugin.grants.allocation_record import RECORD, of_ids, order_of
from deviceplugin.grants.grant_directories import GrantDirectories
from tests.examples import examples
from tests.unit.deviceplugin.builders import uuid
from tests.unit.deviceplugin.grants.grants_kit import record, record_of, restarted
from vgpu.api.codec import grant_from_text
from vgpu.api.contract import PRELOAD_TEXTS, grant_key
from vgpu.api.grant import Grant, GrantGpu

GRANT = Grant("default", "a", "uid-a", "main", (GrantGpu(uuid(0), 4096, 30),))


def test_installing_puts_the_library_under_its_content_and_the_preload_file_beside_it(
    grants: GrantDirectories, tmp_path: Path
) -> None:
    again = grants.install()
    assert again.read_bytes() == b"version 1"
    assert len(again.parent.name) == 16
    for name, text in PRELOAD_TEXTS.items():
        assert (tmp_path / "state" / name).read_text() == text
    assert again.stat().st_mode & 0o777 == 0o755


def test_a_new_library_leaves_the_old_one_to_the_containers_that_have_it(
    grants: GrantDirectories, tmp_path: Path
) -> None:
    old = grants.folder(grants.prepare(record(0))) / "libtangram.so"
    (tmp_path / "image.so").write_bytes(b"version 2")
    grants.install()
    new = grants.folder(grants.prepare(record(1))) / "libtangram.so"
    assert (old.read_bytes(), new.read_bytes()) == (b"version 1", b"version 2")


def test_a_directory_has_the_library_as_a_link_and_no_grant(grants: GrantDirectories) -> None:
    folder = grants.folder(grants.prepare(record(0, 1)))
    assert not (folder / "grant").exists()
    assert (folder / "libtangram.so").stat().st_nlink >= 2
    assert sorted(path.name for path in folder.iterdir()) == [
        ".grant.new", RECORD, "arbiter.sock", "libtangram.so", "socket"
    ]  # fmt: skip
    assert folder.stat().st_mode & 0o777 == 0o755


def test_each_allocation_of_the_same_devices_has_a_directory_of_its_own_the_newest_first(
    grants: GrantDirectories,
) -> None:
    first = grants.prepare(record(0, 1))
    grants.write(first, GRANT)
    inode = (grants.folder(first) / "grant").stat().st_ino
    other = grants.prepare(record(0))
    later = [grants.prepare(record(1, 0, pod=name)) for name in "bcd"]  # the same devices, in any order
    ids = record(0, 1).ids
    assert [folder.key for folder in grants.of_ids(ids)] == [*reversed(later), first]
    assert (grants.folder(first) / "grant").stat().st_ino == inode
    assert len({first, other, *later}) == 5
    assert of_ids([other, first, *later], ids) == [first, *later]
    assert {len(key) for key in (first, *later)} == {32}
    assert [order_of(key) for key in (first, *later)] == [1, 2, 3, 4]


def test_a_removed_directory_is_remembered_until_the_plugin_restarts(grants: GrantDirectories) -> None:
    key = grants.prepare(record(0))
    shutil.rmtree(grants.folder(key))
    (found,) = grants.of_ids(record(0).ids)
    assert (found.key, found.record is not None and found.record.uid, found.trouble) == (key, "uid-a", "")
    state = grants.folder(key).parents[1]
    assert restarted(state, state.with_name("image.so")).of_ids(record(0).ids) == []


def test_the_directory_of_an_earlier_plugin_is_read_under_its_name(grants: GrantDirectories) -> None:
    old = {
        "ids": record(0).ids, "uid": "uid-a", "namespace": "default", "pod": "a", "container": "main",
        "cards": [uuid(0)], "at": 1.0, "v": 1,
    }  # fmt: skip
    folder = grants.folder(grant_key(record(0).ids))
    folder.mkdir()
    (folder / RECORD).write_bytes(msgspec.json.encode(old))
    found = record_of(grants, folder.name)
    assert (found.key, found.uid, found.suffix) == (folder.name, "uid-a", "")
    newer = grants.prepare(record(0, pod="b"))
    assert [one.key for one in grants.of_ids(record(0).ids)] == [newer, folder.name]
    grants.update(found)
    assert record_of(grants, folder.name) == found


def test_a_record_is_on_the_disk_once_its_directory_has_settled(
    grants: GrantDirectories, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    fsync, rename = os.fsync, os.rename

    def synced(descriptor: int) -> None:
        calls.append(Path(f"/proc/self/fd/{descriptor}").readlink().name)
        fsync(descriptor)

    def renamed(path: str, target: str) -> None:
        calls.append(f"rename to {Path(target).parent.name}/{Path(target).name}")
        rename(path, target)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "rename", renamed)
    key = grants.prepare(record(0))
    grants.sync_to_disk(key)
    assert calls == [f"rename to sockets/{key}", f"rename to grants/{key}", RECORD, key, "grants"]


def test_what_a_plugin_that_was_killed_had_begun_goes_at_the_next_start(
    grants: GrantDirectories, tmp_path: Path
) -> None:
    begun = tmp_path / "state/grants/.begun"
    begun.mkdir()
    (begun / "libtangram.so").write_bytes(b"half")
    assert list(grants.keys()) == []
    grants.install()
    assert not begun.exists()


def test_permissions_do_not_depend_on_the_umask(grants: GrantDirectories) -> None:
    before = os.umask(0o077)
    try:
        key = grants.prepare(record(5))
        grants.write(key, GRANT)
    finally:
        os.umask(before)
    assert grants.folder(key).stat().st_mode & 0o777 == 0o755
    assert (grants.folder(key) / "grant").stat().st_mode & 0o777 == 0o444


def test_a_grant_is_written_whole_and_read_back(grants: GrantDirectories) -> None:
    key = grants.prepare(record(0))
    assert grants.read(key) is None
    grants.write(key, GRANT)
    inode = (grants.folder(key) / "grant").stat().st_ino
    grants.write(key, GRANT)
    assert (grants.folder(key) / "grant").stat().st_ino == inode  # the same again is no write
    assert grants.read(key) == grant_from_text((grants.folder(key) / "grant").read_text()) == GRANT


def test_an_allocation_outlives_a_boot(tmp_path: Path) -> None:
    (tmp_path / "image.so").write_bytes(b"version 1")
    before = GrantDirectories(tmp_path / "state", tmp_path / "image.so", boot="first")
    before.install()
    key = before.prepare(record(0))
    after = GrantDirectories(tmp_path / "state", tmp_path / "image.so", boot="second")
    after.install()
    (found,) = after.of_ids(record(0).ids)
    assert found.record == msgspec.structs.replace(record(0), suffix=key.partition("-")[2], boot="first")


def test_what_is_missing_is_restored_and_reported(grants: GrantDirectories, tmp_path: Path) -> None:
    key = grants.prepare(record(0))
    assert grants.restore(key) == []
    (grants.folder(key) / "libtangram.so").unlink()
    (tmp_path / "state/preload").write_text("/something/else\n")
    (tmp_path / "state/ld.so.preload").unlink()
    assert grants.restore(key) == ["preload", "ld.so.preload", "libtangram.so"]
    for name, text in PRELOAD_TEXTS.items():
        assert (tmp_path / "state" / name).read_text() == text


def test_unneeded_folders_are_removed_and_young_or_needed_ones_stay(grants: GrantDirectories) -> None:
    kept, old, young = (grants.prepare(record(slot)) for slot in range(3))
    for key in (kept, old):
        os.utime(grants.folder(key), (1000, 1000))
    os.utime(grants.folder(young), (1900, 1900))
    assert grants.collect({kept}, now=2000.0, older_than_s=300.0) == [old]
    assert sorted(grants.keys()) == sorted([kept, young])


def test_a_directory_that_is_made_while_others_are_removed_stays_and_is_remembered(
    grants: GrantDirectories, monkeypatch: pytest.MonkeyPatch
) -> None:
    scan, made = grants._listing.scan, list[str]()

    def and_then_one_is_made() -> frozenset[str]:
        found = scan()
        made.append(grants.prepare(record(len(made))))
        return found

    with monkeypatch.context() as patch:
        patch.setattr(grants._listing, "scan", and_then_one_is_made)
        grants.collect((), now=0.0, older_than_s=300.0)
    assert made
    assert grants._known.keys() == set(made)
    assert [key for key in made if not grants.socket(key).parent.is_dir()] == []


def test_a_read_of_the_records_while_a_directory_is_removed_does_not_restore_it(
    grants: GrantDirectories, monkeypatch: pytest.MonkeyPatch
) -> None:
    key, rename = grants.prepare(record(0)), Path.rename

    def looked_at(self: Path, target: Path) -> Path:
        assert key in grants.records()
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", looked_at)
    grants.remove(key)
    assert key not in grants.records()
    assert grants.of_ids(record(0).ids) == []


def test_folders_of_pods_that_have_ended_go_sooner(grants: GrantDirectories) -> None:
    ended, other = (grants.prepare(record(slot)) for slot in range(2))
    for key in (ended, other):
        os.utime(grants.folder(key), (1950, 1950))
    patience: dict[str, Any] = {"older_than_s": 300.0, "ended": {ended}, "ended_older_than_s": 15.0}
    assert grants.collect({ended}, now=2000.0, **patience) == []
    assert grants.collect((), now=1960.0, **patience) == []
    assert grants.collect((), now=2000.0, **patience) == [ended]
    assert list(grants.keys()) == [other]


@settings(max_examples=examples(60), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["prepare", "update", "remove", "request", "restart"]),
            st.integers(0, 2),
            st.sampled_from("abc"),
        )
    )
)
def test_the_allocations_of_a_pod_are_those_whose_records_name_it(
    tmp_path: Path, steps: list[tuple[str, int, str]]
) -> None:
    root = Path(mkdtemp(dir=tmp_path))
    (root / "image.so").write_bytes(b"version 1")
    grants = restarted(root)
    keys: dict[int, str] = {}
    for step, slot, pod in steps:
        if step == "restart":
            grants = restarted(root)
        elif step == "remove" and slot in keys:
            grants.remove(keys.pop(slot))
        elif step == "prepare":
            keys[slot] = grants.prepare(record(slot, pod=pod))
        elif step == "update" and slot in keys:
            grants.update(msgspec.structs.replace(record_of(grants, keys[slot]), uid=f"uid-{pod}"))
        elif step == "request":
            records = [(key, record_file.uid) for key in grants.keys() if (record_file := grants.record(key))]  # noqa: SIM118
            requested = {"uid-a", f"uid-{pod}"}
            assert sorted((key, record_file.uid) for key, record_file in grants.of_pods(requested).items()) == [
                (key, uid) for key, uid in records if uid in requested
            ]


def test_whose_an_allocation_is_is_read_once(grants: GrantDirectories, monkeypatch: pytest.MonkeyPatch) -> None:
    key = grants.prepare(record(0))
    assert grants.of_pods({"uid-a"}).keys() == {key}
    monkeypatch.setattr("deviceplugin.grants.grant_directories.read_record", None)
    other = grants.prepare(record(1, pod="b"))
    assert grants.of_pods({"uid-b"}).keys() == {other}
    grants.remove(key)
    assert grants.of_pods({"uid-a", "uid-b"}).keys() == {other}


def test_a_record_that_is_put_right_later_names_its_pod_from_then_on(grants: GrantDirectories) -> None:
    other, key = grants.prepare(record(0)), grants.prepare(record(1, pod="b"))
    record_file = grants.folder(key) / RECORD
    content = record_file.read_bytes()
    record_file.write_text("{")
    after_a_restart = GrantDirectories(grants.folder(key).parents[1], Path("unused"))
    assert after_a_restart.owners() == {other: "uid-a"}
    record_file.write_bytes(content)
    assert after_a_restart.owners() == {other: "uid-a", key: "uid-b"}
    assert after_a_restart.of_pods({"uid-b"}).keys() == {key}


def test_a_removed_library_is_installed_again_for_the_next_allocation(grants: GrantDirectories, tmp_path: Path) -> None:
    shutil.rmtree(tmp_path / "state/lib")
    key = grants.prepare(record(1))
    assert (grants.folder(key) / "libtangram.so").read_bytes() == b"version 1"
    assert (grants.folder(key) / "libtangram.so").samefile(grants.install())


def test_a_grant_and_a_record_removed_from_a_running_container_are_put_back(
    grants: GrantDirectories, tmp_path: Path
) -> None:
    key = grants.prepare(record(1))
    grants.write(key, GRANT)
    other = GrantDirectories(tmp_path / "state", tmp_path / "image.so")  # after a restart of the plugin
    assert other.read(key) == GRANT
    assert other.records()
    (grants.folder(key) / "grant").unlink()
    (grants.folder(key) / RECORD).unlink()
    assert other.put_back() == [str(grants.folder(key) / "grant"), str(grants.folder(key) / RECORD)]
    assert grants.read(key) == GRANT
    assert record_of(grants, key).key == key
    assert other.put_back() == []


def test_what_was_removed_with_its_directory_is_not_put_back(grants: GrantDirectories) -> None:
    key = grants.prepare(record(1))
    grants.write(key, GRANT)
    grants.remove(key)
    assert grants.put_back() == []
    other = grants.prepare(record(2))
    grants.write(other, GRANT)
    shutil.rmtree(grants.folder(other))
    assert grants.put_back() == []

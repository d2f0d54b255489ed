"""Grant directories on their way to the disk: Allocate does not wait for it, a start does."""

from __future__ import annotations

import asyncio
import os
import threading
from pathlib import Path

import pytest

from deviceplugin.grants import disk_thread as disk_thread
from deviceplugin.grants.allocation_record import Record
from deviceplugin.grants.durability import Durability
from deviceplugin.grants.grant_directories import GrantDirectories
from deviceplugin.grants.listing import Listing
from deviceplugin.grants.lookup import as_far_as_another
from tests.unit.deviceplugin.builders import uuid
from vgpu.api.errors import Refused
from vgpu.api.grant import Grant, GrantGpu


async def test_a_start_waits_for_the_directories_that_it_uses_and_for_no_other() -> None:
    answers = {"a": threading.Event(), "b": threading.Event()}
    writing = Durability(lambda key: answers[key].wait(20) and None)
    try:
        writing.begin("a")
        waiting = asyncio.ensure_future(writing.ended(["a", "of an earlier plugin"]))
        writing.begin("b")
        await asyncio.sleep(0)
        assert not waiting.done()
        answers["a"].set()
        await waiting
        assert set(writing.under_way) == {"b"}
    finally:
        answers["b"].set()
    await writing.ended(["b"])
    assert not writing.under_way


async def test_a_disk_that_does_not_answer_refuses_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_thread, "DISK_S", 0.05)
    answers = threading.Event()
    writing = Durability(lambda _: answers.wait(20) and None)
    try:
        writing.begin("a")
        with pytest.raises(Refused, match=r"not answered a write for 0\.05 s: grant directory a is not on the disk"):
            await writing.ended(["a"])
    finally:
        answers.set()
    await writing.ended(["a"])


async def test_a_write_that_fails_is_tried_once_more_and_then_refuses_the_start() -> None:
    tries: list[str] = []

    def fails_twice(key: str) -> None:
        tries.append(key)
        if len(tries) <= 2:
            raise OSError(5, "Input/output error")

    writing = Durability(fails_twice)
    writing.begin("a")
    with pytest.raises(OSError, match="Input/output error"):
        await writing.ended(["a"])
    assert len(tries) == 2
    await writing.ended(["a"])  # the kubelet tries the start again
    assert len(tries) == 3
    assert not writing.under_way


async def test_a_directory_that_is_removed_is_waited_for_no_longer() -> None:
    answers = threading.Event()
    writing = Durability(lambda _: answers.wait(20) and None)
    try:
        writing.begin("a")
        writing.forget("a")
        await writing.ended(["a"])
        assert not answers.is_set(), "its write goes on"
    finally:
        answers.set()


async def test_a_start_does_not_wait_for_what_comes_afterwards() -> None:
    begun, answers = threading.Event(), threading.Event()
    writing = Durability(lambda _: None, lambda: begun.set() or (answers.wait(20) and None))
    try:
        writing.begin("a")
        writing.rest()
        assert await asyncio.to_thread(begun.wait, 10)
        writing.begin("b")
        async with asyncio.timeout(10):
            await writing.ended(["b"])
    finally:
        answers.set()


async def test_what_comes_afterwards_waits_for_a_lull_and_is_done_once_for_what_was_begun() -> None:
    until_idle, done = asyncio.Event(), threading.Event()
    times: list[int] = []
    writing = Durability(lambda _: None, lambda: times.append(1) or done.set(), until_idle=until_idle.wait)  # type: ignore[arg-type,func-returns-value]
    writing.rest()
    writing.begin("a")
    await writing.ended(["a"])
    writing.rest()
    writing.rest()
    await asyncio.sleep(0.01)
    assert times == []
    until_idle.set()
    assert await asyncio.to_thread(done.wait, 10)
    await asyncio.sleep(0.01)
    writing.rest()
    await asyncio.sleep(0.01)
    assert times == [1]


def test_what_begins_with_a_dot_is_no_reason_to_read_names_again_and_all_else_is(tmp_path: Path) -> None:
    listing = Listing(tmp_path)
    read = listing.names()
    with listing.passing_over():
        (tmp_path / ".spare").mkdir()
    assert listing.names() is read
    (tmp_path / "a").mkdir()
    os.utime(tmp_path, ns=(1, 1))  # the clock of the file system may stand still meanwhile
    with listing.passing_over():
        (tmp_path / ".another").mkdir()
    assert listing.names() == {"a"}


def test_names_are_read_again_only_when_the_folder_has_changed(tmp_path: Path) -> None:
    folder = tmp_path / "grants"
    listing = Listing(folder)
    assert not listing.names()
    (folder / "a").mkdir(parents=True)
    (folder / ".begun").mkdir()
    (folder / "file").touch()
    assert listing.names() == {"a"}
    read = listing.names()
    assert listing.names() is read
    (folder / "b").mkdir()
    listing.added("b")
    assert listing.names() == {"a", "b"}
    (folder / "a").rmdir()
    assert listing.scan() == {"b"}


def test_a_start_reads_no_further_than_the_directory_of_another_pod(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "image.so").write_bytes(b"version 1")
    grants = GrantDirectories(tmp_path / "state", tmp_path / "image.so")
    grants.install()
    ids = (f"{uuid(0)}-0",)
    keys = []
    for number in range(6):
        name = f"p{number}"
        keys.append(grants.prepare(Record(ids, f"uid-{name}", "default", name, "main", (uuid(0),), 0.0, 0)))
        if number < 5:
            grants.write(keys[-1], Grant("default", name, f"uid-{name}", "main", (GrantGpu(uuid(0), 1024),)))
    read: list[str] = []
    directory = grants.directory
    monkeypatch.setattr(grants, "directory", lambda key: read.append(key) or directory(key))
    assert [folder.key for folder in as_far_as_another(grants.newest(ids), "uid-p5")] == [keys[5], keys[4]]
    assert read == [keys[5], keys[4]]

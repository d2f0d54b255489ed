"""The CDI specification on a disk that does not answer: bounded waits, one writer, and the last state in the end."""

from __future__ import annotations

import asyncio
import json
import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from deviceplugin.gpus.cdi import SPEC_FILE, DriverRoot
from deviceplugin.gpus.cdi_file import CdiFile, CdiNotWritten
from tests.unit.deviceplugin.builders import inventory
from vgpu.api.inventory import Inventory

LATE_S = 0.05


def file_of(folder: Path, **more: Any) -> CdiFile:
    return CdiFile(folder, DriverRoot(Path("/nowhere"), Path("/")), lambda one: (one, {}), **more)


def devices(folder: Path) -> list[str]:
    return [one["name"] for one in json.loads((folder / SPEC_FILE).read_text())["devices"]]


@contextmanager
def hanging(folder: Path) -> Iterator[None]:
    """To read the specification waits for a writer that does not come; at the end it does."""
    path = folder / SPEC_FILE
    os.mkfifo(path)
    try:
        yield
    finally:
        with path.open("wb"):  # the reader is there
            pass


@dataclass
class SlowDisk:
    """Writes begin and wait until they are let go."""

    answers: threading.Event = field(default_factory=threading.Event)
    begun: threading.Event = field(default_factory=threading.Event)
    written: list[int] = field(default_factory=list)
    at_once: int = 0
    most_at_once: int = 0

    def write(self, _: Path, what: Inventory, __: DriverRoot, ___: Mapping[str, str]) -> bool:
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        self.begun.set()
        assert self.answers.wait(20)
        self.written.append(len(what.gpus))
        self.at_once -= 1
        return True


async def test_a_disk_that_hangs_is_an_error_in_time_and_the_last_state_is_there_once_it_answers(
    tmp_path: Path,
) -> None:
    file = file_of(tmp_path, write_s=LATE_S)
    with hanging(tmp_path):
        for gpus in (1, 2, 3):
            with pytest.raises(CdiNotWritten, match=rf"{SPEC_FILE} was not written within 0\.05 s"):
                await file.write(inventory(gpus))
        with pytest.raises(CdiNotWritten):
            await file.restore()
    await asyncio.wrap_future(file._disk.begin(bool))  # its turn comes after what waited
    assert len(devices(tmp_path)) == 3


async def test_two_writes_never_overlap_and_those_that_wait_become_one_of_the_last_state() -> None:
    disk = SlowDisk()
    file = file_of(Path("/nowhere"), write=disk.write, write_s=20.0)
    first = asyncio.create_task(file.write(inventory(1)))
    assert await asyncio.to_thread(disk.begun.wait, 20)
    others = [asyncio.create_task(file.write(inventory(gpus))) for gpus in (2, 3, 4)]
    await asyncio.sleep(0)
    disk.answers.set()
    await asyncio.gather(first, *others)
    assert disk.written == [1, 4]
    assert disk.most_at_once == 1


async def test_a_write_that_nobody_waits_for_any_more_is_done_all_the_same() -> None:
    disk = SlowDisk()
    file = file_of(Path("/nowhere"), write=disk.write, write_s=LATE_S)
    for gpus in (1, 2):
        with pytest.raises(CdiNotWritten):
            await file.write(inventory(gpus))
    disk.answers.set()
    await file.again()
    assert disk.written in ([1, 2], [1, 2, 2])


async def test_an_error_of_the_disk_reaches_the_caller_and_the_next_write_goes_on(tmp_path: Path) -> None:
    folder = tmp_path / "cdi"
    folder.write_text("no folder")
    file = file_of(folder)
    with pytest.raises(OSError, match="cdi"):
        await file.write(inventory(1))
    folder.unlink()
    await file.again()
    assert len(devices(folder)) == 1
    (folder / SPEC_FILE).unlink()
    await file.restore()
    assert len(devices(folder)) == 1


@pytest.mark.parametrize("before", ["nothing was probed", "nvidia"])
async def test_where_no_specification_is_needed_none_is_written(tmp_path: Path, before: str) -> None:
    file = file_of(tmp_path)
    if before == "nvidia":
        await file.write(Inventory(inventory(1).gpus, 1024, access="nvidia"))
    await file.again()
    await file.restore()
    assert not os.listdir(tmp_path)  # noqa: PTH208


def test_the_description_is_made_when_the_write_is_requested(tmp_path: Path) -> None:
    seen: list[int] = []

    def described(one: Inventory) -> tuple[Inventory, Mapping[str, str]]:
        seen.append(threading.get_ident())
        return one, {}

    file = CdiFile(tmp_path, DriverRoot(Path("/nowhere"), Path("/")), described)
    asyncio.run(file.write(inventory(1)))
    assert seen == [threading.get_ident()]

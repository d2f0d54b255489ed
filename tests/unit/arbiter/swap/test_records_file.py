"""The file of a pool's records, when it cannot be written or read."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from errno import ENOSPC
from pathlib import Path

import pytest

from arbiter.swap.records_file import SPARE_BYTES, RecordsFile, gpus_with_records
from tests.unit.arbiter.swap.node_kit import BOOT, GPU, GRAIN
from vgpu.memory import swap_records
from vgpu.memory.swap_records import PoolRecords, SwapRecord

WRITE = os.write
ONE, OTHER = SwapRecord("a", 5, 7, 1, GRAIN, 0), SwapRecord("a", 5, 7, 2, GRAIN, GRAIN, "filled")


POOL = "1:2:3"


def read(folder: Path) -> tuple[SwapRecord, ...]:
    return RecordsFile(folder, GPU, BOOT).read().records


def test_the_last_records_are_read_and_the_gpu_is_found_by_the_file(tmp_path: Path) -> None:
    file = RecordsFile(tmp_path, GPU, BOOT)
    assert file.read() == PoolRecords()
    assert gpus_with_records(tmp_path / "none") == []
    for record, records in ((ONE, (ONE,)), (OTHER, (ONE, OTHER))):
        assert file.write([], [record], POOL)
        assert RecordsFile(tmp_path, GPU, BOOT).read() == PoolRecords(POOL, records)
    assert file.write([ONE.key], [], POOL)
    assert read(tmp_path) == (OTHER,)
    assert gpus_with_records(tmp_path) == [GPU]
    assert RecordsFile(tmp_path, GPU, "another boot").read() == PoolRecords()


def test_a_write_adds_to_what_was_read(tmp_path: Path) -> None:
    assert RecordsFile(tmp_path, GPU, BOOT).write([], [ONE], POOL)
    file = RecordsFile(tmp_path, GPU, BOOT)
    file.read()
    assert file.write([], [OTHER], POOL)
    assert read(tmp_path) == (ONE, OTHER)


def test_another_pool_is_named_in_the_file(tmp_path: Path) -> None:
    file = RecordsFile(tmp_path, GPU, BOOT)
    assert file.write([], [ONE], POOL)
    assert file.write([ONE.key], [OTHER], "4:5:6")
    assert RecordsFile(tmp_path, GPU, BOOT).read() == PoolRecords("4:5:6", (OTHER,))


def test_the_file_stays_short(tmp_path: Path) -> None:
    file, longest = RecordsFile(tmp_path, GPU, BOOT), 0
    for number in range(3000):
        assert file.write([OTHER.key], [ONE] if number % 2 else [OTHER], POOL)
        longest = max(longest, (tmp_path / f"{GPU}.swap.json").stat().st_size)
    assert 2000 < longest < SPARE_BYTES + 2000
    assert read(tmp_path) == (ONE,)


def test_no_file_becomes_longer_than_can_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is in the host pool would be lost with the next restart of the arbiter."""
    monkeypatch.setattr(swap_records, "LARGEST_BYTES", 4000)
    file, written = RecordsFile(tmp_path, GPU, BOOT), []
    for number in range(1, 400):
        record = SwapRecord("a", 5, 7, number, GRAIN, number * GRAIN)
        if not file.write([], [record], POOL):
            assert not file.write([record.key], [record], POOL), "nothing more is swapped out"
            assert file.write([record.key], [], POOL)
            break
        written.append(record)
        assert read(tmp_path) == tuple(written)
    assert 30 < len(written) < 300
    assert read(tmp_path) == tuple(written)
    assert file.write([written[0].key], [], POOL)
    assert read(tmp_path) == tuple(written[1:])


@pytest.mark.parametrize("how", ["removed", "replaced", "longer", "shorter"])
def test_a_file_that_is_not_as_it_was_left_is_written_whole(tmp_path: Path, how: str) -> None:
    file, path = RecordsFile(tmp_path, GPU, BOOT), tmp_path / f"{GPU}.swap.json"
    assert file.write([], [ONE], POOL)
    content = path.read_bytes()
    match how:
        case "removed":
            path.unlink()
        case "replaced":
            (tmp_path / "other").write_bytes(content)
            (tmp_path / "other").rename(path)
        case "longer":
            path.write_bytes(content + b"{")
        case "shorter":
            path.write_bytes(content[:-5])
    assert file.write([], [OTHER], POOL)
    assert read(tmp_path) == (ONE, OTHER)


def full(_: int, line: bytes) -> int:
    raise OSError(ENOSPC, "no space left")


@pytest.mark.parametrize("write", [full, lambda fd, line: WRITE(fd, line[:20])])
def test_a_line_that_does_not_fit_is_no_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write: Callable[[int, bytes], int]
) -> None:
    file, beside = RecordsFile(tmp_path, GPU, BOOT), tmp_path / f".{GPU}.swap.json.new"
    assert file.write([], [ONE], POOL)
    beside.mkdir()
    with monkeypatch.context() as patched:
        patched.setattr(os, "write", write)
        assert not file.write([], [OTHER], POOL)
    assert read(tmp_path) == (ONE,)
    assert not file.write([], [OTHER], POOL)
    beside.rmdir()
    assert file.write([], [OTHER], POOL)
    assert read(tmp_path) == (ONE, OTHER)


WRITER = f"""
import sys
from pathlib import Path
from arbiter.swap.records_file import RecordsFile
from vgpu.memory.swap_records import SwapRecord
file = RecordsFile(Path(sys.argv[1]), {GPU!r}, {BOOT!r})
file.read()
for number in range(1_000_000):
    block = number % 600
    file.write([(5, 7, (block + 300) % 600)], [SwapRecord("a", 5, 7, block, {GRAIN}, {GRAIN} * block)], {POOL!r})
    print(number, flush=True)
"""


def test_a_writer_that_is_killed_anywhere_leaves_what_it_wrote(tmp_path: Path) -> None:
    """While it appends, and while it writes the file whole: every 700 writes or so."""
    for lines in (1, 50, 699, 1400, 2111):
        writer = subprocess.Popen([sys.executable, "-c", WRITER, tmp_path], stdout=subprocess.PIPE, text=True)
        assert writer.stdout is not None
        printed = [writer.stdout.readline() for _ in range(lines)]
        writer.kill()
        printed += writer.communicate()[0].splitlines(keepends=True)
        done = int([line for line in printed if line.endswith("\n")][-1])
        held = {one.block for one in read(tmp_path)}
        expected = [{number % 600 for number in range(max(0, last - 299), last + 1)} for last in (done, done + 1)]
        assert held in expected
        (tmp_path / f"{GPU}.swap.json").unlink()


def test_records_that_cannot_be_read_are_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = RecordsFile(tmp_path, GPU, BOOT)
    path = tmp_path / f"{GPU}.swap.json"
    path.write_bytes(b"x" * 100)
    assert file.read() == PoolRecords()
    path.unlink()
    path.mkdir()
    assert file.read() == PoolRecords()
    path.rmdir()
    assert file.write([], [ONE], POOL)
    monkeypatch.setattr(swap_records, "LARGEST_BYTES", 10)
    assert file.read() == PoolRecords()

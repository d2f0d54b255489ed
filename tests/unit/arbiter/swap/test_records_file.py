"""The file of a pool's records, when it cannot be written or read."""

from __future__ import annotations

from pathlib import Path

import pytest

from arbiter.swap.records_file import RecordsFile, gpus_with_records
from tests.unit.arbiter.swap.node_kit import BOOT, GPU, GRAIN
from vgpu.memory import swap_records
from vgpu.memory.swap_records import PoolRecords, SwapRecord

ONE, OTHER = SwapRecord("a", 5, 7, 1, GRAIN, 0), SwapRecord("a", 5, 7, 2, GRAIN, GRAIN, "filled")


def test_the_last_records_are_read_and_the_gpu_is_found_by_the_file(tmp_path: Path) -> None:
    file = RecordsFile(tmp_path, GPU, BOOT)
    assert file.read() == PoolRecords()
    assert gpus_with_records(tmp_path / "none") == []
    for records in ((ONE,), (ONE, OTHER)):
        assert file.write(records, "1:2:3")
        assert RecordsFile(tmp_path, GPU, BOOT).read() == PoolRecords("1:2:3", records)
    assert gpus_with_records(tmp_path) == [GPU]
    assert RecordsFile(tmp_path, GPU, "another boot").read() == PoolRecords()


def test_a_write_that_fails_leaves_the_old_records(tmp_path: Path) -> None:
    file = RecordsFile(tmp_path, GPU, BOOT)
    assert file.write([ONE], "1:2:3")
    beside = tmp_path / f".{GPU}.swap.json.new"
    beside.mkdir()
    assert not file.write([OTHER], "1:2:3")
    assert file.read().records == (ONE,)
    beside.rmdir()
    assert file.write([OTHER], "1:2:3")
    assert file.read().records == (OTHER,)


def test_records_that_cannot_be_read_are_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = RecordsFile(tmp_path, GPU, BOOT)
    path = tmp_path / f"{GPU}.swap.json"
    path.write_bytes(b"x" * 100)
    assert file.read() == PoolRecords()
    path.unlink()
    path.mkdir()
    assert file.read() == PoolRecords()
    path.rmdir()
    assert file.write([ONE], "1:2:3")
    monkeypatch.setattr(swap_records, "LARGEST_BYTES", 10)
    assert file.read() == PoolRecords()

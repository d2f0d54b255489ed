"""Which processes were connected is stored across restarts of the arbiter; if it cannot be stored, the answer is unknown, never no."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from arbiter import host
from arbiter.memory.known_processes import FILE, PRUNED_FROM, KnownProcesses, ticks_now


class Host:
    """Processes and when they started."""

    def __init__(self) -> None:
        self.started: dict[int, int] = {}
        self.now = 100

    def memory(self, folder: Path | None, boot: str = "b") -> KnownProcesses:
        path = folder / FILE if folder is not None else None
        return KnownProcesses(path, boot, lambda: self.now, lambda pid: self.started.get(pid, 0))


@pytest.fixture
def node() -> Host:
    return Host()


def test_the_next_arbiter_knows_which_processes_were_connected_and_which_were_not(node: Host, tmp_path: Path) -> None:
    memory = node.memory(tmp_path)
    node.started |= {7: 150, 8: 151, 9: 50}
    memory.add([7])
    node.now = 1000
    for one in (memory, node.memory(tmp_path)):
        assert one.of(7, 150) is True
        assert one.of(8, 151) is False
        assert one.of(9, 50) is None, "it started before anybody watched"
        assert one.of(7, 160) is False, "another process with that pid"


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[]", b'{"boot":"b","since":1,"processes":[[7,1],[8]]}', b'{"boot":"b","since":1,"processes":[],"version":2}', b"\xff"],
)  # fmt: skip
def test_after_an_unreadable_file_running_processes_are_unknown(node: Host, tmp_path: Path, content: bytes) -> None:
    (tmp_path / FILE).write_bytes(content)
    node.started[7] = 90
    assert node.memory(tmp_path).of(7, 90) is None
    assert node.memory(tmp_path).of(8, 101) is False


def test_a_file_of_another_boot_does_not_count(node: Host, tmp_path: Path) -> None:
    node.started[7] = 150
    node.memory(tmp_path).add([7])
    node.now = 200
    assert node.memory(tmp_path, "another").of(7, 150) is None


def test_one_that_cannot_be_written_is_removed_and_known_until_the_restart(
    node: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = node.memory(tmp_path)
    node.started |= {7: 150}

    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as broken:
        broken.setattr(Path, "write_bytes", full)
        memory.add([7])
    assert memory.of(7, 150) is True
    assert not (tmp_path / FILE).exists()
    node.now = 200
    assert node.memory(tmp_path).of(7, 150) is None, "it may have been connected"


def test_without_a_file_it_is_remembered_as_long_as_the_arbiter_lives(node: Host) -> None:
    node.started[7] = 150
    memory = node.memory(None)
    memory.add([7])
    assert memory.of(7, 150) is True


def test_ended_processes_are_dropped_from_the_file(node: Host, tmp_path: Path) -> None:
    memory = node.memory(tmp_path)
    for pid in range(1, 20 * PRUNED_FROM):
        node.started = {pid: 150 + pid}
        memory.add([pid])
    assert (tmp_path / FILE).stat().st_size < PRUNED_FROM * 30
    assert memory.of(pid, 150 + pid) is True


def test_starts_and_the_clock_count_alike() -> None:
    started = host.started_at(os.getpid())
    assert 0 < started <= ticks_now()
    assert ticks_now() - started < 100 * 3600 * 24

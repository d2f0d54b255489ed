"""Command lines in the status document: read of each connected process every 10 s."""

from __future__ import annotations

import pytest

from arbiter.command_lines import COMMAND_S, Commands
from vgpu.protocol.status import ContainerStatus, ProcessStatus


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    done: list[int] = []
    monkeypatch.setattr("arbiter.host.command_of", lambda pid: done.append(pid) or f"program {len(done)}")
    return done


def container(*processes: ProcessStatus) -> ContainerStatus:
    return ContainerStatus(
        key="k", pod="default/a", uid="u", container="main", service_class="standard", level=2, over_limit_action="report", over=False,
        gpus=(), processes=processes, gpu_time=None, memory_state="enforced", gpu_time_state="enforced", unenforced=(),
    )  # fmt: skip


def test_a_connected_process_is_read_again_after_ten_seconds_and_an_unconnected_one_each_time(reads: list[int]) -> None:
    now_s = [100.0]
    commands = Commands(lambda: now_s[0])
    connected, rejection_reason = ProcessStatus(7, 1, "", ()), ProcessStatus(8, 0, "", ())
    assert [commands.of("k", connected) for _ in range(2)] == ["program 1", "program 1"]
    assert [commands.of("k", rejection_reason) for _ in range(2)] == ["program 2", "program 3"]
    now_s[0] += COMMAND_S
    assert commands.of("k", connected) == "program 4"
    assert reads == [7, 8, 8, 7]


def test_a_process_that_is_gone_is_forgotten(reads: list[int]) -> None:
    commands = Commands(lambda: 100.0)
    one, other = ProcessStatus(7, 1, "", ()), ProcessStatus(9, 2, "", ())
    for process in (one, other):
        commands.of("k", process)
    commands.forget([container(other)])
    commands.of("k", other)
    assert reads == [7, 9]
    commands.of("k", one)
    assert reads == [7, 9, 7]

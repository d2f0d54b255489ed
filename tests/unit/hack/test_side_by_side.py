"""hack.side_by_side: commands run at the same time, and are printed one after the other."""

from __future__ import annotations

import io
import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from hack import side_by_side
from hack.side_by_side import run


def test_they_run_at_the_same_time_and_are_printed_in_order(tmp_path: Path) -> None:
    """Each waits for what the other does."""
    first, second = (shlex.quote(str(tmp_path / name)) for name in ("first", "second"))
    os.mkfifo(tmp_path / "first")
    os.mkfifo(tmp_path / "second")
    out = io.BytesIO()
    lines = [f"echo a; cat {second}; echo A > {first}; echo b", f"echo c; echo B > {second}; cat {first}; echo d"]
    assert run(lines, out) == 0
    assert out.getvalue().split() == [b"a", b"B", b"b", b"c", b"A", b"d"]


def test_what_the_first_prints_is_seen_at_once() -> None:
    script = "import sys; from hack.side_by_side import run; sys.exit(run(['echo seen; read word', 'true'], sys.stdout.buffer))"
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"seen\n"
        assert process.wait() == 1, "read found no input"


@pytest.mark.parametrize(
    ("lines", "status"),
    [
        (["true", "true"], 0),
        (["exit 3", "exit 4"], 3),
        (["true", "exit 4"], 4),
        (["kill -9 $$", "true"], 137),
        ([], 0),
    ],
)
def test_the_status_is_that_of_the_first_that_failed(lines: list[str], status: int) -> None:
    assert run(lines, io.BytesIO()) == status


def test_errors_are_printed_in_their_place() -> None:
    out = io.BytesIO()
    run(["echo a; echo b >&2; echo c", "echo d >&2"], out)
    assert out.getvalue() == b"a\nb\nc\nd\n"


def test_a_program_that_a_command_leaves_running_does_not_hold_it_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(side_by_side, "END_S", 0.2)
    pid = tmp_path / "pid"
    out = io.BytesIO()
    assert run([f"sleep 1000 & echo $! > {shlex.quote(str(pid))}; echo started", "echo other"], out) == 0
    assert out.getvalue() == b"started\nother\n"
    os.kill(int(pid.read_text()), signal.SIGKILL)


def test_when_it_is_ended_so_are_the_commands() -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "hack.side_by_side", "echo $$; exec sleep 1000", "exec sleep 1000"],
        stdout=subprocess.PIPE,
    )
    assert process.stdout is not None
    with process:
        pid = int(process.stdout.readline())
        process.terminate()
        assert process.wait() == 128 + signal.SIGTERM
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)

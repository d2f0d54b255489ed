"""A program of the host is given a bounded time and a bounded output."""

from __future__ import annotations

import os
import select
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from deviceplugin.gpus.bounded_run import RunFailed, output_of

PYTHON = sys.executable


def test_the_output_is_taken() -> None:
    assert output_of(["/bin/sh", "-c", "echo '{}'"], 30, 100) == b"{}\n"


@pytest.mark.parametrize(
    ("program", "limit_s", "why"),
    [
        ("exec sleep 60", 0.2, "did not end within 0.2 s"),
        ("exec >&-; exec sleep 60", 0.2, "did not end within 0.2 s"),
        ("cat /dev/zero", 30, "writes more than 1000 bytes"),
        ("exit 3", 30, "ended with status 3"),
        ("kill -9 $$", 30, "ended with status -9"),
    ],
)
def test_a_program_that_exceeds_a_limit_or_fails_is_named(program: str, limit_s: float, why: str) -> None:
    with pytest.raises(RunFailed, match=why):
        output_of(["/bin/sh", "-c", program], limit_s, 1000)


def test_a_program_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(RunFailed, match="cannot be started"):
        output_of([str(tmp_path / "none")], 1, 10)


def test_what_it_started_is_killed_too(tmp_path: Path) -> None:
    """A child that keeps the output open would keep us, and would stay."""
    note = tmp_path / "pid"
    with pytest.raises(RunFailed, match="did not end"):
        output_of(["/bin/sh", "-c", f"sleep 60 & echo $! > {note}; exit 0"], 0.5, 100)
    with suppress(ProcessLookupError):
        ended = os.pidfd_open(int(note.read_text()))
        try:
            assert select.select([ended], [], [], 30)[0], "a killed process ends, and another one sleeps for a minute"
        finally:
            os.close(ended)


def test_a_folder_is_searched_before_the_usual_ones() -> None:
    assert output_of(["/bin/sh", "-c", "echo $PATH"], 30, 1000, "/usr/local/nvidia/toolkit").startswith(
        b"/usr/local/nvidia/toolkit:/usr/local/sbin:"
    )


def test_it_gets_no_variables_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LD_PRELOAD_TANGRAM_TEST", "x")
    shown = output_of([PYTHON, "-c", "import os; print(sorted(os.environ))"], 30, 1000).decode()
    assert "LD_PRELOAD_TANGRAM_TEST" not in shown
    assert "LD_PRELOAD_TANGRAM_TEST" in os.environ

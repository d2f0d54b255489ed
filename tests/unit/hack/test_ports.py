"""Ports that tests give to programs."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests import ports
from tests.built import REPOSITORY

LOOKER = """
import os, sys
os.getpid = lambda: int(sys.argv[1]) - ports.FIRST
from tests import ports
print(*(ports.free_port() for _ in range(20)), flush=True)
input()
"""


def look_from(port: int) -> subprocess.Popen[str]:
    """A process that is given 20 ports, looking from this one upwards, and keeps them until its input ends."""
    command = [sys.executable, "-c", LOOKER, str(port)]
    return subprocess.Popen(command, cwd=REPOSITORY, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def found_by(process: subprocess.Popen[str]) -> set[int]:
    assert process.stdout is not None
    return {int(port) for port in process.stdout.readline().split()}


def test_a_port_is_given_to_one_process_at_a_time() -> None:
    with look_from(20_000) as one, look_from(20_000) as other:
        first, second = found_by(one), found_by(other)
        one.communicate()
        other.communicate()
    assert len(first | second) == 40


def test_a_port_with_a_listener_is_not_free() -> None:
    with look_from(25_000) as one:
        port = min(found_by(one))
        one.communicate()
    with socket.create_server(("127.0.0.1", port)), look_from(port) as other:
        assert port not in found_by(other)
        other.communicate()


@pytest.mark.parametrize(("first", "end"), [(12_410, 12_410), (12_400, 30_000), (1024, 30_000), (65_000, 30_000)])
def test_ports_lie_below_where_connections_begin_unless_that_leaves_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first: int, end: int
) -> None:
    (tmp_path / "range").write_text(f"{first}\t65535\n")
    monkeypatch.setattr(ports, "_RANGE", tmp_path / "range")
    ports._candidates.cache_clear()
    assert 12_400 <= ports.free_port() < end
    assert {*ports._candidates()} < {*range(12_400, end)}
    ports._candidates.cache_clear()

"""A line of /proc/<pid>/stat, whatever the program is called."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vgpu.api.process_stat import ProcessStat, process_stat

REST = b" 1 1 0 -1 4194560 0 0 0 0 0 0 0 0 20 0 1 0 987654 0 0"


@given(st.binary(max_size=15), st.sampled_from("RSDTtZXI"))
def test_a_name_may_contain_anything(name: bytes, state: str) -> None:
    found = process_stat(b"42 (%b) %b 7%b\n" % (name, state.encode(), REST))
    assert found == ProcessStat(42, state, 7, 987654)
    assert found.ended is (state in "ZX")


@pytest.mark.parametrize("line", [b"", b"\n", b"42", b"42 (x)", b"42 (x) S", b"(x) S 1 2", b"x (y) S 1 2"])
def test_what_is_no_line_reports_nothing(line: bytes) -> None:
    assert process_stat(line) is None


def test_a_line_that_ends_early_reports_no_start() -> None:
    assert process_stat(b"42 (x) D 1 1 1\n") == ProcessStat(42, "D", 1, 0)


def test_the_kernel_writes_it_so() -> None:
    found = process_stat(Path("/proc/self/stat").read_bytes())
    assert found is not None
    assert (found.pid, found.parent, found.ended) == (os.getpid(), os.getppid(), False)
    assert found.started > 0

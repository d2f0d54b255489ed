"""The page that a container's processes read."""

from __future__ import annotations

import os
import struct

from arbiter.gputime.timer import now_s
from arbiter.page import ContainerPage
from vgpu.protocol.wire import GPU_TIME_AT, PAGE_BYTES


def state_of(page: ContainerPage) -> tuple[int, int, int]:
    """The last beat in ms, off, gate: what a library reads."""
    beat_ms, off, gate = struct.unpack_from("<QII", os.pread(page.fd, PAGE_BYTES, 0), GPU_TIME_AT)
    return beat_ms, off, gate


def test_the_page_shows_a_live_arbiter_before_the_first_beat() -> None:
    page = ContainerPage()
    assert state_of(page) == (0, 0, 0)
    before_ms = int(now_s() * 1000)
    page.show_state(off=True, gate=True, alive_ms=int(now_s() * 1000))
    beat_ms, off, gate = state_of(page)
    assert (off, gate) == (1, 1)
    assert before_ms <= beat_ms <= now_s() * 1000


def test_a_container_that_runs_is_shown_so_and_needs_no_heartbeat() -> None:
    page = ContainerPage()
    page.beat(7)
    page.show_state(off=False)
    assert state_of(page) == (7, 0, 0)

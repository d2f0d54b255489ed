"""The warm-up of the request path leaves nothing behind."""

from __future__ import annotations

import pytest

from arbiter.connection import Connection, PeerGone
from arbiter.gputime.warm_up import EVERY_S, WarmUp
from tests.unit.arbiter.conftest import wait_for
from tests.unit.arbiter.gputime_kit import Driver, GpuTimeNode
from vgpu.protocol.wire import Activity, ActivityKind


def test_each_message_is_read_and_none_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    read, plain = list[object](), Connection.receive_with_fd
    monkeypatch.setattr(Connection, "receive_with_fd", lambda self: read.append(plain(self)))
    warm_up = WarmUp()
    for ms in range(10_000):  # more than its budget has at once
        warm_up.play(100.0 + ms * EVERY_S * 1.01)
        warm_up.play(100.0 + ms * EVERY_S * 1.01 + EVERY_S / 2)
    assert read == [(None, Activity(ActivityKind.WORK))] * 10_000
    assert plain(warm_up._connection) is None
    warm_up.close()
    assert [warm_up._us.fileno(), warm_up._connection.sock.fileno()] == [-1, -1], "both ends are closed"


def test_one_that_fails_costs_nothing_but_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    warm_up, short = WarmUp(), [True]
    plain = Connection.receive_with_fd

    def gone(connection: Connection) -> object:
        if short[0]:
            raise PeerGone("no memory")
        return plain(connection)

    monkeypatch.setattr(Connection, "receive_with_fd", gone)
    for ms in range(2000):  # until its socket is full, and on
        warm_up.play(100.0 + ms * EVERY_S * 1.01)
    short[0] = False
    assert warm_up._connection.receive_with_fd() == (None, Activity(ActivityKind.WORK))
    warm_up.close()


def test_a_napping_thread_rehearses_and_no_container_counts_as_working(
    monkeypatch: pytest.MonkeyPatch, driver: Driver
) -> None:
    played, plain = list[float](), WarmUp.play

    def play(warm_up: WarmUp, at_s: float) -> None:
        played.append(at_s)
        plain(warm_up, at_s)

    monkeypatch.setattr(WarmUp, "play", play)
    node = GpuTimeNode(awake_s=0.2)
    try:
        urgent, background = node.container("lc", "latency-critical"), node.container("be", "best-effort")
        background.works()
        wait_for(lambda: not node.scheduler.containers["lc"].working() and node.scheduler.containers["be"].working())
        played.clear()
        urgent.idles()
        wait_for(lambda: len(played) > 20)
        assert not node.scheduler.containers["lc"].working()
        assert driver.owed() == 0
        assert node.scheduler.counters.bad_packets == 0
    finally:
        node.close()

"""The thread that distinguishes a stall of the arbiter from a slow call: it runs during calls to the driver, and rests otherwise."""

from __future__ import annotations

from collections.abc import Iterator
from math import inf

import pytest

from arbiter import stalls as pulse
from arbiter.gputime.timer import now_s
from arbiter.stalls import PERIOD_S, STALL_S, Pulse
from tests.unit.arbiter.conftest import wait_for


@pytest.fixture
def beating(monkeypatch: pytest.MonkeyPatch) -> Iterator[Pulse]:
    monkeypatch.setattr(pulse, "AWAKE_S", 0.3)
    made = Pulse(now_s)
    made.start()
    yield made
    made.close()


def test_it_rests_without_calls_to_the_driver_and_continues_for_a_while_after_one(beating: Pulse) -> None:
    wait_for(lambda: beating._rests)
    assert beating._due_s == inf
    began_s = now_s()
    beating.expect(began_s)
    wait_for(lambda: began_s + PERIOD_S < beating._due_s < inf)
    wait_for(lambda: beating._rests)
    assert now_s() - began_s >= 0.3


def test_a_rest_is_no_stall_and_a_stall_right_after_a_call_began_is_one() -> None:
    at_s = 100.0
    resting = Pulse(lambda: at_s)  # its thread is not started: it never comes round
    resting.wake()
    assert resting._may_rest()
    at_s = 200.0
    resting.expect(at_s)
    assert resting.stalled_since(200.0, 200.0 + PERIOD_S) is None
    assert resting.stalled_since(200.0, 200.0 + PERIOD_S + STALL_S) == 200.0
    assert not resting._may_rest(), "it is needed now"


def test_one_that_rests_ends_when_it_is_closed(beating: Pulse) -> None:
    wait_for(lambda: beating._rests)
    beating.close()
    assert not beating._thread.is_alive()

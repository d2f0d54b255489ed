"""Which changes of containers' work are known, and when they are forgotten."""

from __future__ import annotations

from arbiter.swap.activity import QUIET_S, ActivityChanges
from vgpu.memory.swap.events import Announced, Working


def test_what_was_not_taken_of_a_container_that_is_gone_is_dropped() -> None:
    changes = ActivityChanges(lambda: 0.0, lambda: None)
    for name in ("gone", "stays"):
        changes.working(name, works=True)
        changes.announced(name, 0.1)
    changes.forget("gone")
    assert changes.take(QUIET_S, everything=False) == [Announced(0.0, "stays", 0.1), Working(0.0, "stays")]
    assert not changes.works("gone")
    assert changes.works("stays")

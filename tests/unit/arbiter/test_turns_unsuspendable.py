"""Tenants that cannot be suspended, and drivers that nobody has tried: they are gated, run on, and it is said."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from structlog.testing import capture_logs

from tests.unit.arbiter.conftest import wait_for
from tests.unit.arbiter.turns_kit import Driver, TurnsNode

MANY = tuple(range(3, 67))


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    made = Driver()
    monkeypatch.setattr("arbiter.seat.fcntl.ioctl", made.ioctl)
    return made


@pytest.fixture
def node(driver: Driver) -> Iterator[TurnsNode]:
    made = TurnsNode()
    yield made
    assert not made.failed.is_set(), "a card's thread failed"
    made.close()
    assert driver.owed() == 0, "everybody runs after the end"


def test_more_channels_than_a_list_holds_are_gated_and_keep_their_connection(node: TurnsNode, driver: Driver):
    many, urgent = node.tenant("be", "best-effort", channels=False), node.tenant("lc", "latency-critical")
    with capture_logs() as log:
        for _ in range(3):
            many.tells_channels(MANY, unlisted=True)
        many.works()
        wait_for(lambda: node.status("be").working)
        urgent.works()
        wait_for(lambda: node.gate("be"))
    assert (node.status("be").mode, "more than 64" in node.status("be").trouble) == ("gate", True)
    assert [line["grant"] for line in log if line["log_level"] == "error"] == ["be"], "said once"
    assert (many.client, True) not in driver.calls
    urgent.idles()
    wait_for(lambda: not node.gate("be"))
    assert node.turns.counts.failures == 0


def test_who_grows_past_a_list_while_it_is_off_runs_on_all_channels_it_had(node: TurnsNode, driver: Driver):
    grown, urgent = node.tenant("be", "best-effort"), node.tenant("lc", "latency-critical")
    sibling = node.tenant("be", "best-effort")
    for one in (grown, sibling, urgent):
        one.works()
    wait_for(lambda: driver.off(grown) and driver.off(sibling))
    grown.tells_channels(tuple(range(4, 68)), unlisted=True)  # of its first two one has fallen off the list
    wait_for(lambda: driver.owed() == 0)
    wait_for(lambda: node.gate("be"))
    grown.tells_channels((3, 4, 5))
    wait_for(lambda: driver.off(grown) and driver.off(sibling))
    assert (node.gate("be"), node.status("be").mode, node.status("be").trouble) == (False, "suspend", "")

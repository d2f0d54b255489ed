"""Tenants that cannot be suspended, and drivers that nobody has tried: they are gated, run on, and it is said."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from arbiter.__main__ import driver_version
from tests.unit.arbiter.conftest import wait_for
from tests.unit.arbiter.turns_kit import Driver, TurnsNode

MANY = tuple(range(3, 67))


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


def test_a_container_of_which_one_process_cannot_be_stopped_runs_whole(node: TurnsNode, driver: Driver):
    first, second = node.tenant("be", "best-effort"), node.tenant("be", "best-effort")
    urgent = node.tenant("lc", "latency-critical")
    driver.refuse(second, 0x56, starts=False)
    first.works()
    second.works()
    wait_for(lambda: node.status("be").working and node.seats("be") == 2)
    urgent.works()
    wait_for(lambda: node.gate("be"))
    assert (first.client, True) in driver.calls, "it was stopped before the other one refused"
    assert not driver.off(first)
    assert node.status("be").mode == "gate"


# -- a driver that nobody has tried ---------------------------------------------------------------------------------------------


@pytest.fixture
def untried(driver: Driver) -> Iterator[TurnsNode]:
    made = TurnsNode(driver="612.3.1", heal_s=0)
    yield made
    assert not made.failed.is_set(), "a card's thread failed"
    made.close()
    assert driver.owed() == 0, "everybody runs after the end"


def disables(driver: Driver, client: int) -> int:
    return driver.calls.count((client, True))


def test_an_untried_driver_is_tried_on_each_tenants_channels_before_anybody_is_stopped(
    untried: TurnsNode, driver: Driver
):
    background, urgent = untried.tenant("be", "best-effort"), untried.tenant("lc", "latency-critical")
    for one in (background, urgent):
        wait_for(lambda one=one: disables(driver, one.client) == 2)
    assert driver.owed() == 0
    assert (untried.status("be").mode, untried.status("be").trouble) == ("suspend", "")
    background.works()
    urgent.works()
    wait_for(lambda: driver.off(background))
    assert disables(driver, background.client) == 3
    background.tells_channels((3, 4, 5))
    wait_for(lambda: driver.off(background) and disables(driver, background.client) == 6)
    urgent.idles()
    wait_for(lambda: not driver.off(background))


@pytest.mark.parametrize(
    ("status", "starts"), [(0x56, False), (0x56, True), (-1, True)], ids=["to stop", "both", "no ioctl at all"]
)
def test_an_untried_driver_that_refuses_is_not_relied_on_and_its_version_is_named(
    untried: TurnsNode, driver: Driver, status: int, starts: bool
):
    background = untried.tenant("be", "best-effort", channels=False)
    driver.refuse(background, status, starts=starts)
    with capture_logs() as log:
        background.tells_channels()
        wait_for(lambda: untried.status("be").trouble)
    assert "driver 612.3.1 was never tried before: the driver answered" in untried.status("be").trouble
    assert [line["grant"] for line in log if line["log_level"] == "error"] == ["be"]
    tried = disables(driver, background.client)
    urgent = untried.tenant("lc", "latency-critical")
    background.works()
    urgent.works()
    wait_for(lambda: untried.gate("be"))
    assert untried.status("be").mode == "gate"
    assert disables(driver, background.client) == tried, "it is not stopped on a driver that refused"
    assert untried.status("lc").mode == "suspend", "one tenant's list says nothing of another's"


def test_an_untried_driver_that_stops_what_does_not_exist_is_not_relied_on(untried: TurnsNode, driver: Driver):
    driver.nobody = 0
    background = untried.tenant("be", "best-effort")
    wait_for(lambda: "does not exist" in untried.status("be").trouble)
    urgent = untried.tenant("lc", "latency-critical")
    background.works()
    urgent.works()
    wait_for(lambda: untried.gate("be"))
    assert not driver.off(background)


def test_a_driver_that_was_tried_is_not_tried_again(node: TurnsNode, driver: Driver):
    one = node.tenant("a")
    one.works()
    wait_for(lambda: node.status("a").working)
    assert disables(driver, one.client) == 0


def test_the_version_is_that_of_the_module_that_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    version = tmp_path / "version"
    monkeypatch.setattr("arbiter.__main__.MODULE_VERSION", version)
    assert driver_version() == ""
    version.write_text("580.159.04\n")
    assert driver_version() == "580.159.04"

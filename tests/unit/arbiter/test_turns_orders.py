"""Who is stopped for a request before anything is decided, and that it is what would have been decided."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.unit.arbiter.conftest import wait_for
from tests.unit.arbiter.turns_kit import A, B, Driver, Tenant, TurnsNode
from vgpu.grant import Grant, GrantCard
from vgpu.share import Share
from vgpu.trace import from_lines, to_lines
from vgpu.wire import Activity, What

SAYS: dict[str, Callable[[Tenant], None]] = {
    "work": Tenant.works,
    "a section": lambda tenant: tenant.send(Activity(What.BEGIN_SECTION)),
    "work in 1.5 ms": lambda tenant: tenant.send(Activity(What.HINT, 1500)),
}


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    made = Driver()
    monkeypatch.setattr("arbiter.seat.fcntl.ioctl", made.ioctl)
    return made


@pytest.fixture
def node(driver: Driver) -> Iterator[TurnsNode]:
    made = TurnsNode()
    yield made
    driver.before = None
    made.close()
    assert driver.owed() == 0, "everybody runs after the end"


class Watched:
    """At each suspend: had the policy heard of the request by then? Was the lock free?"""

    def __init__(self, node: TurnsNode, driver: Driver) -> None:
        self.node, self.decided, self.locked = node, list[bool](), list[bool]()
        driver.before = self._look

    def _look(self, _: int, disable: bool) -> None:
        if not disable:
            return
        free = self.node.turns.lock.acquire(blocking=False)
        self.locked.append(not free)
        if free:
            states = self.node.turns.share._states
            self.decided.append(any(s.active(self.node.turns.share._now_s) for n, s in states.items() if n == "lc"))
            self.node.turns.lock.release()


def ordered(node: TurnsNode, name: str = "lc", card: str = A) -> list[str]:
    """Who would be stopped at once for a tenant's work."""
    with node.turns.lock:
        tenant = node.turns.tenants[name]
        return [other.name for other in node.turns.at_once(card, tenant, Activity(What.WORK))]


@pytest.mark.parametrize("said", SAYS)
def test_a_request_stops_a_neighbour_before_the_policy_is_asked(node: TurnsNode, driver: Driver, said: str) -> None:
    urgent, background = node.tenant("lc", "latency-critical"), node.tenant("be", "best-effort")
    background.works()
    wait_for(lambda: ordered(node) == ["be"])
    watched = Watched(node, driver)
    SAYS[said](urgent)
    wait_for(lambda: driver.off(background))
    assert (watched.decided, watched.locked) == ([False], [False])
    wait_for(lambda: not node.status("be").on)
    assert node.status("be").suspends == 1
    urgent.works()
    urgent.idles()
    urgent.send(Activity(What.END_SECTION))
    wait_for(lambda: not driver.off(background))


def test_what_was_stopped_by_order_is_in_the_books_as_if_it_had_been_decided(node: TurnsNode, driver: Driver) -> None:
    urgent, background = node.tenant("lc", "latency-critical"), node.tenant("be", "best-effort")
    background.works()
    wait_for(lambda: ordered(node) == ["be"])
    urgent.works()
    wait_for(lambda: not node.status("be").on)
    assert node.status("lc").clearing_s > 0, "what the request waited"
    assert node.status("be").suspends == driver.calls_about(background).count(True) == 1
    with node.turns.lock:
        again, events = Share(), list(node.turns.trace)
        for event in from_lines(to_lines(events)):
            again.apply(event)
        at_s = events[-1].at_s
        assert again.decide(at_s).on == node.turns._decision.on == {"lc"}


def test_work_that_is_announced_for_later_stops_nobody_yet(node: TurnsNode, driver: Driver) -> None:
    urgent, background = node.tenant("lc", "latency-critical"), node.tenant("be", "best-effort")
    background.works()
    wait_for(lambda: ordered(node) == ["be"])
    urgent.send(Activity(What.HINT, 400_000))
    assert node.is_quiet()
    assert True not in driver.calls_about(background)


def test_nobody_is_ordered_to_stop_whom_the_policy_leaves_on(node: TurnsNode, driver: Driver) -> None:
    urgent, equal = node.tenant("lc", "latency-critical"), node.tenant("other", "latency-critical")
    equal.works()
    assert node.is_quiet()
    assert ordered(node) == []
    urgent.works()
    assert node.is_quiet()
    assert True not in driver.calls_about(equal)


def test_a_gang_is_in_no_order_and_has_none(node: TurnsNode, driver: Driver) -> None:
    urgent, gang = node.tenant("lc", "latency-critical"), node.tenant("gang", "best-effort", cards=(A, B))
    gang.tells_channels((5, 6), card=1)
    gang.works()
    wait_for(lambda: node.status("gang").working)
    assert node.is_quiet()
    assert ordered(node) == []
    urgent.works()
    wait_for(lambda: driver.off(gang))


def test_orders_end_with_the_class_that_they_were_given_for(node: TurnsNode, driver: Driver) -> None:
    urgent, background = node.tenant("lc", "latency-critical"), node.tenant("be", "best-effort")
    background.works()
    wait_for(lambda: ordered(node) == ["be"])
    grant = Grant("default", "lc", "uid-lc", "main", (GrantCard(A, 1024, 0),), "best-effort", 2)
    node.turns.change("lc", grant)
    assert ordered(node) == []
    urgent.works()
    assert node.is_quiet()
    assert True not in driver.calls_about(background)


def test_who_cannot_be_suspended_is_asked_once(node: TurnsNode, driver: Driver) -> None:
    urgent, background = node.tenant("lc", "latency-critical"), node.tenant("be", "best-effort")
    background.works()
    wait_for(lambda: ordered(node) == ["be"])
    driver.refuse(background, 0x56)
    urgent.works()
    wait_for(lambda: "0x56" in node.status("be").trouble)
    assert node.status("be").on
    urgent.idles()
    assert node.is_quiet()
    assert ordered(node) == []


@pytest.mark.parametrize("leaves", ["lc", "be"])
def test_a_grant_may_go_while_its_order_is_carried_out(node: TurnsNode, driver: Driver, leaves: str) -> None:
    urgent, background = node.tenant("lc", "latency-critical"), node.tenant("be", "best-effort")
    background.works()
    wait_for(lambda: ordered(node) == ["be"])
    gone: list[str] = []

    def drop(_: int, disable: bool) -> None:
        if disable and not gone:
            gone.append(leaves)
            node.drop(leaves)

    driver.before = drop
    urgent.works()
    wait_for(lambda: gone == [leaves])
    wait_for(lambda: not driver.off(background))
    assert not node.failed.is_set()


def test_a_neighbour_that_was_stopped_by_another_is_not_stopped_twice(node: TurnsNode, driver: Driver) -> None:
    """A disable is counted: two need two enables."""
    urgent, background = node.tenant("lc", "latency-critical"), node.tenant("be", "best-effort")
    background.works()
    for _ in range(50):
        urgent.works()
        urgent.idles()
    wait_for(lambda: not node.status("lc").working)
    wait_for(lambda: not driver.off(background))
    assert driver.owed() == 0

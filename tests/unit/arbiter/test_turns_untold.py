"""What follows when the driver's count and a container's word cannot both be true. The driver is a double of Seat's call."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import suppress

import pytest
from structlog.testing import capture_logs

from arbiter.process import Process
from arbiter.tenant import TenantTurns
from arbiter.timer import now_s
from arbiter.turn_metrics import families
from arbiter.word import FORGET_S, LOOK_MOST_S
from tests.unit.arbiter.conftest import wait_for
from tests.unit.arbiter.turns_kit import A, Driver, TurnsNode
from vgpu import wire
from vgpu.effect import TIMES
from vgpu.grant import Grant, GrantCard
from vgpu.untold import ENOUGH_S, Doubt
from vgpu.wire import Activity, What


@pytest.fixture
def node(driver: Driver) -> Iterator[TurnsNode]:
    made = TurnsNode(hold_untold=True)
    yield made
    assert not made.failed.is_set(), "a card's thread failed"
    made.close()
    assert driver.owed() == 0, "everybody runs after the end"


def look(node: TurnsNode, seen_s: dict[str, float]) -> None:
    """A second passes in which the driver sees these compute."""
    with node.turns.lock:
        tenants = [tenant for name, tenant in node.turns.tenants.items() if name in seen_s]
        at_s = max([now_s(), *(tenant.word.weighed[0] + 1 for tenant in tenants if tenant.word.weighed)])
    node.turns.witness(seen_s, frozenset(), at_s)


def accuse(node: TurnsNode, name: str) -> None:
    """The driver sees it compute without a word until that is enough."""
    wait_for(lambda: name in node.turns.statuses())
    for _ in range(5):
        assert not node.status(name).untold
        look(node, {name: 1.0})
    assert node.status(name).untold, "the first look has nothing to compare with; then four of a second are enough"


def acquit(node: TurnsNode, name: str) -> None:
    """Nothing is seen of it until it is believed again."""
    for _ in range(100):
        look(node, {name: 0.0})
        if not node.status(name).untold:
            return
    raise AssertionError("it is believed again within a minute")


def works_unseen(node: TurnsNode, name: str) -> bool:
    """Does the policy take it to have work?"""
    with node.turns.lock:
        return node.turns.share._states[name].working


def test_who_computes_unsaid_gives_way_to_whoever_has_work_and_is_no_longer_believed(node: TurnsNode, driver: Driver):
    liar, other = node.tenant("liar"), node.tenant("other")
    other.works()
    wait_for(lambda: node.status("other").working)
    assert not driver.off(liar)
    with capture_logs() as log:
        accuse(node, "liar")
    assert [line["grant"] for line in log if line["log_level"] == "warning"] == ["liar"]
    wait_for(lambda: driver.off(liar))
    liar.idles()
    assert node.is_quiet()
    assert driver.off(liar), "its word does not count"
    assert not node.status("liar").working
    other.idles()
    wait_for(lambda: not driver.off(liar))
    other.works()
    wait_for(lambda: driver.off(liar))
    acquit(node, "liar")
    assert not works_unseen(node, "liar")
    other.idles()
    wait_for(lambda: not driver.off(liar))


def test_what_it_does_tell_of_keeps_its_class(node: TurnsNode, driver: Driver):
    """So one that is accused wrongly loses nothing at its requests."""
    one, background = node.tenant("lc", "latency-critical"), node.tenant("be", "best-effort")
    background.works()
    accuse(node, "lc")
    assert node.is_quiet()
    assert not driver.off(background), "untold work of a latency-critical container stops nobody"
    one.works()
    wait_for(lambda: driver.off(background))
    one.idles()
    wait_for(lambda: not driver.off(background))


def test_a_verdict_outlives_the_process_and_a_container_without_processes_has_no_work(node: TurnsNode, driver: Driver):
    liar, other = node.tenant("liar"), node.tenant("other")
    other.works()
    accuse(node, "liar")
    wait_for(lambda: driver.off(liar))
    driver.free(liar)
    liar.close()
    wait_for(lambda: not works_unseen(node, "liar"))
    again = node.tenant("liar")
    wait_for(lambda: driver.off(again))


def test_a_container_that_is_not_there_any_more_is_not_judged(node: TurnsNode):
    node.tenant("a")
    node.status("a")
    node.drop("a")
    node.turns.witness({"a": 1.0, "never": 1.0}, frozenset(), now_s())
    assert "a" not in node.turns.statuses()


def test_who_is_not_listened_to_counts_as_working_meanwhile(node: TurnsNode, driver: Driver, monkeypatch):
    """Else a flood of messages would hide work, and a container of many processes would be taken for a liar."""
    told: list[float] = []
    monkeypatch.setattr(Doubt, "look", lambda _, passed_s, told_s, __: told.append(told_s / passed_s))
    flooder = node.tenant("flood", "best-effort")
    node.status("flood")
    with node.turns.lock:
        node.turns.tenants["flood"].budget._a_second = 200.0  # so that a slow machine floods, too
    stop = threading.Event()

    def flood() -> None:
        flooder.sock.setblocking(True)
        with suppress(OSError):  # hung up on at the end, in the middle of a send
            while not stop.is_set():
                for what in (What.WORK, What.IDLE):
                    flooder.sock.send(wire.encode(1, Activity(what)))

    thread = threading.Thread(target=flood)
    thread.start()
    try:
        wait_for(lambda: node.turns.counts.held_back, 20)
        node.turns.witness({"flood": 0.0}, frozenset(), now_s())
        held_back = node.turns.counts.held_back
        wait_for(lambda: node.turns.counts.held_back > held_back + 3, 20)
        node.turns.witness({"flood": 1.0}, frozenset(), now_s())
    finally:
        stop.set()
        flooder.sock.shutdown(2)
        thread.join(10)
    assert told[0] > 0.5


def test_what_is_asked_and_had_and_waited_for_is_in_the_metrics(node: TurnsNode, driver: Driver):
    capped, urgent = node.tenant("capped", core=30), node.tenant("lc", "latency-critical")
    capped.works()
    wait_for(lambda: node.status("capped").suspends >= 1)
    urgent.works()
    wait_for(lambda: node.status("lc").working)
    grants = {name: Grant("ns", name, "", "main", (GrantCard(A, 1, 0),), "standard", 2) for name in ("capped", "lc")}
    assert not node.turns.checks(now_s())
    node.turns.witness({"capped": 0.3}, frozenset(), now_s())
    told = {
        (sample.name.removeprefix("tangram_arbiter_"), sample.labels.get("pod", "")): sample.value
        for family in families(node.turns, grants)
        for sample in family.samples
    }
    assert told["turns_asked_percent", "capped"] == 30
    assert told["turns_asked_percent", "lc"] == told["turns_credit_seconds", "lc"] == 0
    assert -0.1 < told["turns_credit_seconds", "capped"] <= 0.3 * 0.05 * 3
    assert told["turns_on_seconds_total", "capped"] > 0
    assert told["suspends_total", "capped"] >= 1
    assert 0 < told["turns_suspended_seconds_total", "capped"] >= told["turns_capped_seconds_total", "capped"]
    assert told["turns_arrivals_total", "lc"] == 1
    assert told["turns_clearing_seconds_total", "lc"] >= 0
    assert told["turns_seen_seconds_total", "capped"] == 0, "the first look has nothing to compare with"
    assert told["turns_untold", "capped"] == 0
    assert told["turns_untold_found_total", ""] == 0
    assert told["checks", ""] == 1


def test_without_hold_untold_it_is_told_of_and_nothing_follows(driver: Driver) -> None:
    node = TurnsNode()
    liar, other = node.tenant("liar"), node.tenant("other", "best-effort")
    other.works()
    wait_for(lambda: node.status("other").working)
    with capture_logs() as log:
        accuse(node, "liar")
    assert [line["event"] for line in log if line["log_level"] == "warning"] == [
        "computes while it says it is idle: nothing follows from that here"
    ]
    assert node.turns.counts.untold == 1
    assert not works_unseen(node, "liar")
    assert node.is_quiet()
    assert not driver.off(liar)
    assert not driver.off(other)
    node.close()


def test_a_verdict_that_no_look_confirms_ends(node: TurnsNode, monkeypatch: pytest.MonkeyPatch) -> None:
    """As when NVML is gone, or the card: nobody is held for ever to what was seen once."""
    node.tenant("liar")
    accuse(node, "liar")
    assert works_unseen(node, "liar")
    monkeypatch.setattr("arbiter.turns.now_s", lambda: now_s() + FORGET_S + 10)
    wait_for(lambda: not node.status("liar").untold, 30)
    assert not works_unseen(node, "liar")
    monkeypatch.undo()
    assert not node.turns.checks(now_s() + FORGET_S + 10)


def judged(at_s: list[float], seen_s: list[float], *, works: bool, on: bool = True, core: int = 0) -> TenantTurns:
    """A container after these looks, that said before all of them whether it works and was switched then."""
    grant = Grant("ns", "a", "uid", "main", (GrantCard(A, 1, core),), "standard", 2)
    tenant = TenantTurns("a", grant, None, at_s[0] - 1, holds=True)
    tenant.processes[1] = Process(1)
    tenant.says(1, Activity(What.WORK if works else What.IDLE), at_s[0] - 1)
    tenant.stands(at_s[0] - 1, on=on)
    for at, seconds in zip(at_s, seen_s, strict=True):
        tenant.weigh(at, seconds)
    return tenant


@pytest.mark.parametrize(
    ("at_s", "seen_s", "doubt_s"),
    [
        ([10], [1.0], 0.0),
        ([10, 11], [1.0, 1.0], 0.9),
        ([10, 11, 12, 13], [1.0] * 4, 2.7),
        ([10, 11, 12, 13, 14], [1.0] * 5, 3.6),
        ([10, 12, 14], [1.0, 2.0, 2.0], 3.6),
        ([10, 11, 12, 13, 113], [1.0, 1.0, 1.0, 1.0, 2.0], 0.0),
        ([10, 11, 13.5, 14.5], [1.0, 1.0, 2.0, 1.0], 0.9 - 0.25 + 0.9),
        ([10, 13, 16, 19, 22, 25, 28], [1.0] + [2.0] * 6, 0.0),
        ([10, 11, 11, 12], [1.0, 1.0, 0.0, 1.0], 1.8),
    ],
)
def test_what_speaks_against_one_is_what_was_seen_and_never_what_a_pause_hid(
    at_s: list[float], seen_s: list[float], doubt_s: float
) -> None:
    tenant = judged(at_s, seen_s, works=False)
    assert tenant.word.suspicion.seconds == pytest.approx(doubt_s)
    assert tenant.word.suspicion.proven == (doubt_s >= ENOUGH_S)
    assert tenant.word.seen_s == pytest.approx(sum(seen_s[1:]))


def test_a_pause_speaks_for_whoever_told_of_work_in_it() -> None:
    """What the next look sees may be of before its end: the driver counts late."""
    tenant = judged([10, 11], [0.0, 1.0], works=False)
    tenant.says(1, Activity(What.WORK), 11)
    tenant.weigh(11 + LOOK_MOST_S + 1, 1.0)
    assert tenant.word.suspicion.seconds == 0


@pytest.mark.parametrize(("on", "proven"), [(True, False), (False, True)])
def test_what_it_says_while_it_is_off_explains_nothing(*, on: bool, proven: bool) -> None:
    """Else one who says all the time that it works could compute past the library while its own cap stops it."""
    tenant = judged([float(at) for at in range(10, 20)], [1.0] * 10, works=True, on=on, core=10)
    assert tenant.word.suspicion.proven is proven


def test_what_a_gated_one_says_while_it_is_off_counts() -> None:
    """Its kernels go on."""
    grant = Grant("ns", "a", "uid", "main", (GrantCard(A, 1, 10),), "standard", 2)
    tenant = TenantTurns("a", grant, None, 9.0)
    tenant.processes[1] = Process(1)
    for _ in range(TIMES):
        tenant.evidence.effect.ended(9.0)
    tenant.says(1, Activity(What.WORK), 9.0)
    tenant.stands(9.0, on=False)
    for at in range(10, 20):
        tenant.weigh(float(at), 1.0)
    assert not tenant.word.suspicion.proven


@pytest.mark.parametrize(("seen_s", "pace"), [(1.0, 1.0), (0.5, 0.5), (0.2, 0.2), (2.0, 1.0)])
def test_time_without_a_word_costs_what_the_driver_saw_of_it(seen_s: float, pace: float) -> None:
    tenant = judged([float(at) for at in range(10, 60)], [seen_s] * 50, works=False)
    assert tenant.word.suspicion.proven
    assert tenant.word.pace == pytest.approx(pace)


# --- work that was reported and that the driver does not see any more ---


def see(node: TurnsNode, whole: bool = True) -> None:
    """A second passes in which the driver sees nobody compute; `whole`: and would have seen the container."""
    with node.turns.lock:
        tenant = node.turns.tenants["a"]
        at_s = max(now_s(), tenant.word.added_until_s + 1, (tenant.word.weighed or (0.0,))[0] + 1)
    node.turns.witness({"a": 0.0}, frozenset({"a"} if whole else ()), at_s)


def is_working(node: TurnsNode) -> bool:
    with node.turns.lock:
        return node.turns.tenants["a"].tells_work()


@pytest.fixture
def working(node: TurnsNode) -> TurnsNode:
    """A container that launched kernels and never says that they have ended."""
    node.tenant("a").send(Activity(What.WORK, wire.KERNELS_ONLY))
    wait_for(lambda: node.status("a").working)
    return node


def test_reported_work_that_the_driver_does_not_see_ends_and_a_word_brings_it_back(working: TurnsNode) -> None:
    for _ in range(3):
        see(working)
    assert not is_working(working)
    assert working.turns.counts.decays == 1
    working.tenants[0].send(Activity(What.STILL, wire.KERNELS_ONLY))
    wait_for(lambda: is_working(working))


def test_where_the_driver_could_not_see_it_reported_work_stays(working: TurnsNode) -> None:
    for _ in range(10):
        see(working, whole=False)
    assert is_working(working)


def test_a_copy_that_follows_a_kernel_keeps_the_work(working: TurnsNode) -> None:
    working.tenants[0].send(Activity(What.STILL, 0))
    wait_for(lambda: not any(p.kernels_only for p in working.turns.tenants["a"].processes.values()))
    for _ in range(10):
        see(working)
    assert is_working(working)

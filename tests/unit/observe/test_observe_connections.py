"""Which connections an HTTP server closes when clients exceed its bounds."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from observe.bounds import Bounds
from observe.connections import ANSWERED_WELL_S, ORDINARY, YOUNG_S, ClientConnection, ClientConnections, Phase

BOUNDS = Bounds(body_bytes=100, connections=6, per_address=3, held_bytes=100, request_s=10, answer_s=5, idle_s=30)


def opened(connections: ClientConnections, *arrivals: tuple[str, float]) -> list[ClientConnection]:
    made = [ClientConnection(address, at_s) for address, at_s in arrivals]
    assert [connections.add(one) for one in made] == [None] * len(made)
    return made


def serve(connections: ClientConnections, one: ClientConnection, at_s: float) -> None:
    for phase in (Phase.WORK, Phase.ANSWER, Phase.IDLE):
        connections.enter(one, phase, at_s)


def test_an_address_that_has_its_share_loses_its_oldest_connection_without_a_request() -> None:
    connections = ClientConnections(BOUNDS)
    served, first, _ = opened(connections, ("a", 0), ("a", 1), ("a", 2))
    serve(connections, served, 3)
    assert connections.add(ClientConnection("a", 10)) is first
    assert connections.add(ClientConnection("b", 10)) is None


def test_only_an_address_with_more_than_an_equal_part_is_over_it() -> None:
    """Where each address of a flood has as many as the others, one that is closed may be of a client that floods nothing."""
    alike = ClientConnections(BOUNDS)
    first, *_ = opened(alike, *((address, at_s) for at_s, address in enumerate("abcdef")))
    assert alike.add(ClientConnection("g", 9)) is first
    assert not first.over_its_part
    connections = ClientConnections(BOUNDS)
    _, greedy, *_ = opened(connections, ("b", 0), ("a", 1), ("a", 1), ("c", 1), ("d", 1), ("e", 1))
    assert connections.add(ClientConnection("f", 9)) is greedy
    assert greedy.over_its_part
    own = ClientConnections(BOUNDS)
    oldest, *_ = opened(own, ("a", 0), ("a", 1), ("a", 2))
    assert own.add(ClientConnection("a", 3)) is oldest
    assert oldest.over_its_part


def test_when_all_are_taken_the_oldest_without_a_request_goes_and_last_one_that_was_served() -> None:
    connections = ClientConnections(BOUNDS)
    served, *others = opened(connections, ("a", 0), ("a", 1), ("b", 2), ("b", 3), ("c", 4), ("c", 5))
    serve(connections, served, 6)
    lost = [connections.add(ClientConnection(address, 100 + number)) for number, address in enumerate("defghi")]
    assert lost[:5] == others
    assert lost[5] is not served


def test_a_young_request_is_worth_more_than_an_idle_connection_of_the_client_with_the_most() -> None:
    connections = ClientConnections(BOUNDS)
    many = opened(connections, ("a", 0), ("a", 0), ("a", 0), ("b", 0), ("c", 0))
    for one in many:
        serve(connections, one, 1)
    (young,) = opened(connections, ("d", 50))
    assert connections.add(ClientConnection("e", 50 + YOUNG_S / 2)) is many[0]
    assert young in connections


def test_a_flood_of_young_connections_costs_none_that_a_client_with_few_keeps() -> None:
    connections = ClientConnections(BOUNDS)
    (kept,) = opened(connections, ("api", 0))
    serve(connections, kept, 1)
    for number in range(100):
        connections.add(ClientConnection("ab"[number % 2], 50 + number / 1000))
    assert kept in connections


def test_a_client_with_few_connections_has_time_for_its_handshake_while_a_flood_keeps_idle_ones() -> None:
    connections = ClientConnections(BOUNDS)
    flood = opened(connections, ("a", 0), ("a", 0), ("a", 0), ("b", 0), ("b", 0))
    for one in flood:
        serve(connections, one, 1)
    (slow,) = opened(connections, ("api", 50))
    assert connections.add(ClientConnection("b", 50 + 3 * YOUNG_S)) is flood[0]
    assert slow in connections
    assert connections.add(ClientConnection("c", 50.1 + BOUNDS.request_s)) is slow


def test_an_api_server_with_many_calls_under_way_loses_none_to_clients_with_fewer() -> None:
    connections = ClientConnections(BOUNDS)
    calls = opened(connections, ("api", 0), ("api", 0), ("api", 0))
    connections.answered_well(calls[0], 1)
    serve(connections, calls[0], 1)
    flood = opened(connections, ("a", 2), ("a", 2), ("b", 2))
    assert connections.add(ClientConnection("c", 2 + 2 * YOUNG_S)) is flood[0]
    assert connections.add(ClientConnection("d", 2 + 2 * YOUNG_S)) in flood
    assert all(one in connections for one in calls)


def test_what_an_address_was_once_answered_counts_for_a_minute() -> None:
    connections = ClientConnections(replace(BOUNDS, request_s=1000))
    calls = opened(connections, ("api", 0), ("api", 0), ("api", 0))
    connections.answered_well(calls[0], 0)
    opened(connections, ("a", 2), ("a", 2), ("b", 2))
    assert connections.expired(ANSWERED_WELL_S + 1) == []
    assert connections.add(ClientConnection("c", ANSWERED_WELL_S + 2)) is calls[0]


def test_addresses_that_were_answered_well_are_remembered_up_to_a_limit() -> None:
    connections = ClientConnections(BOUNDS)
    for number in range(100):
        connections.answered_well(ClientConnection(str(number), 0), 0)
    assert list(connections._answered_well_s) == [str(number) for number in range(94, 100)]


def test_too_much_in_memory_costs_the_oldest_holder_and_never_one_whose_answer_is_being_made() -> None:
    connections = ClientConnections(BOUNDS)
    working, slow, late = opened(connections, ("a", 0), ("b", 1), ("c", 20))
    assert [connections.hold(one, 40) for one in (working, slow)] == [[], []]
    connections.enter(working, Phase.WORK, 2)
    assert connections.hold(late, 40) == [slow]
    assert connections.held_bytes == 80
    assert connections.hold(late, 40) == [late]
    assert connections.held_bytes == 40


def test_memory_is_dropped_until_what_is_left_fits() -> None:
    connections = ClientConnections(BOUNDS)
    *small, large = opened(connections, ("a", 0), ("b", 1), ("c", 2), ("d", 3))
    assert [connections.hold(one, 10) for one in small] == [[]] * 3
    assert connections.hold(large, 90) == small[:2]
    assert connections.held_bytes == 100


def test_memory_of_a_connection_that_was_answered_well_is_dropped_for_no_unproven_client_and_after_all_of_them() -> (
    None
):
    connections = ClientConnections(replace(BOUNDS, trusted=True))
    scheduler, unproven, another = opened(connections, ("s", 0), ("a", 50), ("b", 51))
    serve(connections, scheduler, 1)
    connections.answered_well(scheduler, 1)
    connections.enter(scheduler, Phase.REQUEST, 2)
    assert connections.hold(scheduler, 60) == []
    assert connections.hold(unproven, 50) == [unproven]
    assert connections.hold(another, 40) == []
    assert connections.hold(scheduler, 1) == [another]
    assert connections.held_bytes == 61


def test_a_queued_request_is_dropped_for_that_of_another_client() -> None:
    connections = ClientConnections(BOUNDS)
    *flood, honest = opened(connections, ("a", 0), ("a", 0), ("b", 1))
    for one in flood:
        connections.enter(one, Phase.QUEUED, 1)
        assert connections.hold(one, 50) == []
    assert connections.hold(honest, 10) == [flood[0]]


def test_requests_of_unknown_clients_that_are_being_answered_leave_memory_for_one_of_any_size() -> None:
    connections = ClientConnections(replace(BOUNDS, held_bytes=250, trusted=True))
    scheduler, *unproven = opened(connections, ("s", 0), ("s", 1), ("s", 2))
    connections.answered_well(scheduler, 1)
    for one in unproven:
        connections.enter(one, Phase.WORK, 1)
    assert [connections.hold(one, 75) for one in unproven] == [[], []]
    assert connections.hold(unproven[0], 1) == [unproven[0]]
    assert connections.hold(scheduler, 100) == []


def test_what_is_released_twice_counts_once() -> None:
    connections = ClientConnections(BOUNDS)
    one, other = opened(connections, ("a", 0), ("b", 0))
    assert connections.hold(one, 40) == connections.hold(other, 30) == []
    connections.release(one, 40)
    connections.release(one, 40)
    assert connections.held_bytes == 30


@pytest.mark.parametrize(("phase", "limit_s"), [(Phase.REQUEST, 10), (Phase.ANSWER, 5), (Phase.IDLE, 30)])
def test_a_phase_ends_after_its_time(phase: Phase, limit_s: float) -> None:
    connections = ClientConnections(BOUNDS)
    (one,) = opened(connections, ("a", 0))
    connections.enter(one, phase, 100)
    assert connections.expired(100 + limit_s) == []
    assert connections.expired(100.1 + limit_s) == [one]
    assert one not in connections


def test_the_time_that_the_program_needs_is_not_the_clients() -> None:
    connections = ClientConnections(BOUNDS)
    (one,) = opened(connections, ("a", 0))
    connections.enter(one, Phase.WORK, 0)
    assert connections.expired(1e6) == []


STEPS = st.lists(
    st.tuples(st.sampled_from(["add", "work", "answer", "idle", "hold", "remove", "expire"]), st.integers(0, 9), st.integers(0, 60)),
    max_size=80,
)  # fmt: skip


@given(STEPS)
def test_whatever_clients_do_no_bound_is_exceeded_and_the_counts_are_those_of_the_open_connections(
    steps: list[tuple[str, int, int]],
) -> None:
    connections = ClientConnections(BOUNDS)
    known: list[ClientConnection] = []
    at_s = 0.0
    for step, number, amount in steps:
        at_s += amount / 20
        chosen = known[number % len(known)] if known else None
        if step == "add":
            known.append(ClientConnection("abcde"[number % 5], at_s))
            connections.add(known[-1])
        elif step == "expire":
            connections.expired(at_s)
        elif chosen is None:
            continue
        elif step == "remove":
            connections.remove(chosen)
        elif step == "hold":
            if chosen.phase is not Phase.WORK:
                connections.hold(chosen, amount)
        else:
            connections.enter(chosen, Phase[step.upper()], at_s)
        alive = [one for one in known if one in connections]
        assert len(connections) == len(alive) <= BOUNDS.connections
        assert all(sum(one.address == address for one in alive) <= BOUNDS.per_address for address in "abcde")
        assert connections.held_bytes == sum(one.held_bytes for one in alive)
        working = sum(one.held_bytes for one in alive if one.phase is Phase.WORK)
        assert connections.held_bytes <= max(BOUNDS.held_bytes, working)


def slow_choices(
    among: list[ClientConnection], every: list[ClientConnection], well: set[str], at_s: float
) -> list[ClientConnection | None]:
    """What may be closed, by a look at all connections, oldest phase first: the oldest of each address that has the most."""
    count = Counter(one.address for one in every)
    weight = {address: count[address] * (1 if address in well else ORDINARY) for address in count}
    part = sum(weight.values()) / max(1, len(weight))
    unserved = [one for one in among if one.phase is Phase.REQUEST and not one.served]
    for one in unserved:
        age_s = at_s - one.since_s
        if age_s > YOUNG_S and (weight[one.address] >= part or age_s > BOUNDS.request_s):
            return [one]
    most = max((weight[one.address] for one in among), default=0)
    heaviest = [one for one in among if weight[one.address] == most]
    idle = [one for one in heaviest if one.phase is Phase.IDLE]
    first = next(filter(None, ([one for one in heaviest if one in unserved], idle, heaviest)), [])
    heads = {one.address: one for one in reversed(first)}
    return [*sorted(heads.values(), key=first.index)] or [None]


CHANGES = st.lists(
    st.tuples(st.sampled_from(["add"] * 6 + ["request", "queued", "work", "answer", "idle", "idle", "well", "hold", "remove", "expire"]), st.integers(0, 19), st.integers(0, 30)),
    min_size=40, max_size=120,
)  # fmt: skip


@given(CHANGES, st.booleans())
def test_the_connection_that_is_closed_is_the_one_that_a_comparison_of_all_finds(
    changes: list[tuple[str, int, int]], trusted: bool
) -> None:
    connections = ClientConnections(replace(BOUNDS, trusted=trusted))
    trust = set[ClientConnection]()
    alive: list[ClientConnection] = []
    well: dict[str, float] = {}
    at_s = 0.0
    for change, number, amount in changes:
        at_s += amount**2 / 600
        one = alive[number % len(alive)] if alive else None
        if change == "add":
            new = ClientConnection("aaabbbcccdddeefghijk"[number], at_s)
            same = [other for other in alive if other.address == new.address]
            among = same if len(same) == BOUNDS.per_address else alive if len(alive) == BOUNDS.connections else []
            closed = connections.add(new)
            assert closed in slow_choices(among, alive, set(well), at_s)
            alive = [other for other in alive if other is not closed] + [new]
        elif change == "expire":
            late = connections.expired(at_s)
            alive = [other for other in alive if other not in late]
            well = {address: well_s for address, well_s in well.items() if at_s - well_s <= ANSWERED_WELL_S}
        elif one is None:
            continue
        elif change == "remove":
            connections.remove(one)
            alive.remove(one)
        elif change == "well":
            connections.answered_well(one, at_s)
            well[one.address] = at_s
            if trusted:
                trust.add(one)
        elif change == "hold":
            others = [
                other for other in alive if other.held_bytes and other.phase is not Phase.WORK and other is not one
            ]
            held = {other: other.held_bytes for other in alive}
            held[one] += amount
            expected = list[ClientConnection]()
            while sum(held.values()) > BOUNDS.held_bytes and one not in expected:
                unproven = [other for other in others if other not in trust]
                among = unproven or (others if one in trust or not trusted else [])
                expected.append(slow_choices(among, alive, set(well), one.since_s)[0] or one)
                held[expected[-1]] = 0
                others = [other for other in others if other not in expected]
            assert connections.hold(one, amount) == expected
            assert {other: other.held_bytes for other in alive} == held
        else:
            connections.enter(one, Phase[change.upper()], at_s)
            alive = [other for other in alive if other is not one] + [one]

"""Whose request it is: properties over a model of the kubelet's device manager."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deviceplugin.allocate import Choice, Flight, Request, Tenant, candidates, check_room, contradiction, prefer, settle
from deviceplugin.ledger import Ledger
from tests.examples import examples
from tests.unit.deviceplugin.builders import KnownPods, ModelKubelet, inventory, share, tenant, uuid
from vgpu.contract import uuid_of
from vgpu.errors import Refused
from vgpu.grant import Assignment, Slice
from vgpu.names import DEFAULT
from vgpu.request import Ask

MEM, CORE = DEFAULT.gpu_mem, DEFAULT.gpu_core


def cards_of(ids: frozenset[str]) -> Counter[str]:
    return Counter(uuid_of(one) for one in ids)


def set_up(access: str, seed: int, cards: int = 2) -> tuple[KnownPods, Ledger, ModelKubelet]:
    pods, has = KnownPods(), inventory(cards, access=access)
    ledger = Ledger(pods, lambda: has, DEFAULT, clock=lambda: 0.0, patience_s=0.01)
    return pods, ledger, ModelKubelet(ledger, has, random.Random(seed))


@given(
    st.lists(st.tuples(st.integers(0, 1), st.sampled_from([0, 25])), min_size=2, max_size=4),
    st.sampled_from(["cdi", "nvidia"]),
    st.integers(0, 10_000),
    st.data(),
)
@settings(max_examples=examples(60), deadline=None)
async def test_pods_of_one_size_in_any_order_have_mem_and_core_on_one_card_and_no_card_is_overbooked(
    sizes: list[tuple[int, int]], access: str, seed: int, data: st.DataObject
) -> None:
    core = sizes[0][1]
    pods, _, kubelet = set_up(access, seed)
    waiting = [tenant(f"p{i}", i, share("main", 4, core), on=[card]) for i, (card, _) in enumerate(sizes)]
    for one in waiting:
        pods.show(one)
    for one in data.draw(st.permutations(waiting)):
        await kubelet.admit(one)
        if data.draw(st.booleans()):
            pods.admitted(one)
    counted: Counter[str] = Counter()
    for books in kubelet.books.values():
        where = {resource: set(cards_of(ids)) for (_, resource), ids in books.items()}
        assert len(where[MEM]) == 1
        assert CORE not in where or where[CORE] == where[MEM]
        counted += cards_of(books["main", MEM])
    meant = Counter({uuid(i): n * 4 for i, n in Counter(card for card, _ in sizes).items()})
    assert counted == meant  # I3: whoever was taken for whom, each card has what was assigned there


@given(st.integers(0, 10_000), st.sampled_from(["cdi", "nvidia"]), st.booleans())
@settings(max_examples=examples(30), deadline=None)
async def test_each_of_several_containers_gets_its_own_card_whatever_the_order_of_resources(
    seed: int, access: str, known_at_once: bool
) -> None:
    pods, ledger, kubelet = set_up(access, seed, cards=3)
    many = tenant("many", 0, share("a", 4, 20), share("b", 4, 30), share("c", 6), on={"a": [0], "b": [1], "c": [2]})
    other = tenant("other", 1, share("a", 6, 50), on=[0])
    pods.show(many)
    if known_at_once:
        pods.show(other)
    await kubelet.admit(many)
    pods.show(other)
    await kubelet.admit(other)
    for pod in (many, other):
        for (container, resource), ids in kubelet.books[pod.uid].items():
            assert set(cards_of(ids)) == set(pod.assignment.uuids(container)), (container, resource)
            assert ledger.holders(resource, ids) == [(pod.uid, container)]


@given(st.integers(0, 10_000))
@settings(max_examples=examples(30), deadline=None)
async def test_app_containers_reuse_an_init_containers_devices_and_get_the_rest_on_the_same_cards(seed: int) -> None:
    pods, _, kubelet = set_up("cdi", seed, cards=3)
    one = tenant("p", 0, share("init", 4, 10, 2, init=True), share("app", 8, 20, 2), on=[0, 2])
    pods.show(one)
    await kubelet.admit(one)
    books = kubelet.books[one.uid]
    assert books["init", MEM] < books["app", MEM]
    assert cards_of(books["app", MEM]) == {uuid(0): 4, uuid(2): 4}
    assert set(cards_of(books["app", CORE])) == {uuid(0), uuid(2)}


@given(st.integers(0, 10_000))
@settings(max_examples=examples(30), deadline=None)
async def test_an_app_container_smaller_than_the_init_container_keeps_to_the_pods_cards(seed: int) -> None:
    pods, ledger, kubelet = set_up("cdi", seed, cards=3)
    one = tenant("p", 0, share("init", 8, 0, 2, init=True), share("app", 4, 0, 2), on=[0, 2])
    pods.show(one)
    await kubelet.admit(one)
    assert set(cards_of(kubelet.books[one.uid]["app", MEM])) <= {uuid(0), uuid(2)}
    assert ledger.done[one.uid]["app", MEM] == kubelet.books[one.uid]["app", MEM]


@pytest.mark.parametrize("seed", range(20))
async def test_a_wrong_guess_is_corrected_as_soon_as_a_request_shows_it(seed: int) -> None:
    pods, ledger, kubelet = set_up("nvidia", seed)
    small, large = tenant("small", 0, share("main", 4, 10), on=[0]), tenant("large", 1, share("main", 4, 60), on=[0])
    pods.show(small)
    pods.show(large)
    await kubelet.admit(large)  # the younger one comes first, and its memory tells nothing
    assert ledger.done.keys() == {large.uid}
    await kubelet.admit(small)
    assert ledger.done[small.uid]["main", CORE] == kubelet.books[small.uid]["main", CORE]


async def test_a_pod_that_the_kubelet_rejected_half_way_does_not_hold_up_the_next() -> None:
    pods, ledger, kubelet = set_up("cdi", 1)
    rejected, following = tenant("r", 0, share("main", 4, 10), on=[0]), tenant("f", 1, share("main", 6, 10), on=[1])
    pods.show(rejected)
    pods.show(following)
    await ledger.allocate(MEM, await ledger.prefer(MEM, sorted(kubelet.all[MEM]), [], 4))
    await kubelet.admit(following)
    assert set(cards_of(kubelet.books[following.uid]["main", MEM])) == {uuid(1)}
    assert set(cards_of(kubelet.books[following.uid]["main", CORE])) <= {uuid(0), uuid(1)}


async def test_a_request_waits_for_the_watch_to_bring_its_pod() -> None:
    import asyncio

    pods, ledger, kubelet = set_up("cdi", 1)
    ledger._patience_s = 5.0
    late = tenant("late", 0, share("main", 4), on=[1])
    admission = asyncio.create_task(kubelet.admit(late))
    await asyncio.sleep(0)
    pods.show(late)
    await admission
    assert set(cards_of(kubelet.books[late.uid]["main", MEM])) == {uuid(1)}


async def test_a_pod_that_came_past_our_scheduler_is_refused_with_a_sentence() -> None:
    _, _, kubelet = set_up("cdi", 1)
    with pytest.raises(
        Refused, match=r"no pod that waits on this node was assigned 4 tangram.sh/gpu-mem.*Tangram's scheduler"
    ):
        await kubelet.admit(tenant("stranger", 0, share("main", 4), on=[0]))


async def test_assignments_beyond_a_cards_memory_are_refused() -> None:
    pods, _, kubelet = set_up("cdi", 1)
    for name in ("a", "b"):
        pods.show(tenant(name, 0, share("main", 10), on=[0]))
    with pytest.raises(Refused, match=r"has 16384 MiB .* assigned 20480 MiB"):
        await kubelet.admit(pods.shown["uid-a"])


def test_a_whole_card_shared_with_anybody_is_refused() -> None:
    whole = tenant("w", 0, Ask("main", "whole", 1, core_percent=100), on=[0])
    check_room([whole], [uuid(0)], inventory())
    with pytest.raises(Refused, match="to one container alone and to others"):
        check_room([whole, tenant("s", 1, share("main", 1), on=[0])], [uuid(0)], inventory())


def test_devices_on_an_unassigned_card_are_refused_with_cdi_and_taken_as_a_swap_with_nvidias_runtime() -> None:
    one = tenant("p", 0, share("main", 2), on=[0])
    ids = [f"{uuid(1)}-{slot}" for slot in range(2)]

    def choices() -> list[Choice]:
        return list(candidates([one], {}, Flight(), Request(MEM, 2), DEFAULT))

    with pytest.raises(Refused, match=f"chose devices on {uuid(1)} for pod default/p, which was assigned {uuid(0)}"):
        settle(choices(), ids, Request(MEM, 2), must_match=True)
    assert settle(choices(), ids, Request(MEM, 2), must_match=False).swapped


def test_preferred_devices_contain_what_the_kubelet_demands_and_nothing_off_the_card() -> None:
    one = tenant("p", 0, share("main", 3), on=[1])
    (choice,) = candidates([one], {}, Flight(), Request(MEM, 3), DEFAULT)
    available = [f"{uuid(card)}-{slot}" for card in (0, 1) for slot in range(12)]
    assert prefer(choice, available, [f"{uuid(1)}-11"], 3) == [f"{uuid(1)}-11", f"{uuid(1)}-0", f"{uuid(1)}-1"]
    assert prefer(choice, available[:13], [], 3) is None


def test_an_assignment_that_contradicts_the_ask_is_told() -> None:
    asks = (share("main", 4, 30),)

    def says(*pieces: Slice) -> str:
        return contradiction(asks, Assignment({"main": pieces})) or ""

    assert says(Slice(uuid(0), 0, 4096, 30)) == ""
    assert "assigned 8192 MiB and 30 percent" in says(Slice(uuid(0), 0, 8192, 30))
    assert "assigned 0 GPUs and asks for 1" in says()
    assert "assigned a whole" in says(Slice(uuid(0), 0, 4096, 30, "whole"))


def test_a_pod_being_deleted_is_meant_last() -> None:
    from dataclasses import replace

    leaving: Tenant = replace(tenant("old", 0, share("main", 4), on=[0]), leaving=True)
    fresh = tenant("new", 1, share("main", 4), on=[1])
    found = [c.tenant.name for c in candidates([leaving, fresh], {}, Flight(), Request(MEM, 4), DEFAULT)]
    assert found == ["new", "old"]


@pytest.mark.parametrize("core", [0, 20])
@pytest.mark.parametrize("fate", ["gone", "admitted"])
async def test_a_pod_whose_devices_a_twin_took_is_served_when_its_own_turn_comes(core: int, fate: str) -> None:
    pods, _, kubelet = set_up("nvidia", 3)
    first, twin = tenant("first", 0, share("main", 4, core), on=[0]), tenant("twin", 1, share("main", 4, core), on=[1])
    pods.show(first)
    pods.show(twin)
    await kubelet.admit(twin)  # taken for the first, which waits longer
    if fate == "gone":
        kubelet.remove(twin)
        pods.gone(twin)
    else:
        pods.admitted(twin)
    await kubelet.admit(first)
    meant = (
        uuid(0) if fate == "gone" else uuid(1)
    )  # the twin has the first's card in the kubelet's books, so it gets the twin's
    assert all(set(cards_of(ids)) == {meant} for ids in kubelet.books[first.uid].values())

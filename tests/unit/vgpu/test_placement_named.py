"""Candidates that come as the text of a request: the answer is that for the same candidates as strings."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.examples import examples
from tests.unit.vgpu.test_placement_views import NODES, asks, fleets
from vgpu.constraints import Condition, Term
from vgpu.fleet import Fleet
from vgpu.inventory import Card, Inventory
from vgpu.placement import GUESSES, Placement, place
from vgpu.policy import POLICIES
from vgpu.request import Ask, PodAsk
from vgpu.roster import Quoted, Roster
from vgpu.wishes import Wishes

SHARE = PodAsk((Ask("main", "share", 1, mib=4),))


def quoted(names: list[str], *, escaped: str = "") -> Quoted:
    """In a body, as kube-scheduler writes it; one of the names with an escape that nobody needs."""
    text = json.dumps(names, separators=(",", ":"))
    if escaped:
        text = text.replace(f'"{escaped}"', f'"\\u{ord(escaped[0]):04x}{escaped[1:]}"')
    body = f'{{"NodeNames":{text}}}'.encode()
    return Quoted(body, body.index(b"[") + 1, len(body) - 2)


def packed(*free_mib: int) -> Fleet:
    """Nodes a, b, ... with a card each that has so much left."""
    fleet = Fleet()
    for name, mib in zip("abcdefghij", free_mib, strict=False):
        fleet.set_node(name, Inventory((Card(f"card-{name}", 0, "t4", mib),)))
    return fleet


@settings(max_examples=examples(400), deadline=None)
@given(fleets(), asks(), st.sampled_from(sorted(POLICIES)), st.data())
def test_a_text_of_names_is_answered_as_a_list_of_them(
    fleet: Fleet, ask: PodAsk, policy: str, data: st.DataObject
) -> None:
    ask = replace(ask, policy=policy)
    asked = data.draw(st.lists(st.sampled_from([*NODES, "stranger", "gone"]), unique=True, min_size=1))
    escaped = data.draw(st.sampled_from(["", *asked]))
    assert place(fleet, ask, quoted(asked, escaped=escaped)) == place(fleet, ask, asked)


@pytest.mark.parametrize(("asked", "best"), [("abcdef", "d"), ("abcef", "c"), ("efabx", "b"), ("afexyz", "a")])
def test_the_best_node_that_is_named_is_found_without_finding_every_name(
    monkeypatch: pytest.MonkeyPatch, asked: str, best: str
) -> None:
    monkeypatch.delattr(Roster, "find")
    placement = place(packed(8, 7, 6, 5, 9, 10), SHARE, quoted(list(asked)))
    assert isinstance(placement, Placement)
    assert placement.node == best


@pytest.mark.parametrize(("asked", "best"), [("xyzefg", "e"), ("xyzg", "g"), ("g", "g")])
def test_it_is_found_too_when_it_is_far_down(asked: str, best: str) -> None:
    assert "abcdefg".index(best) >= GUESSES
    placement = place(packed(5, 6, 7, 8, 9, 10, 11), SHARE, quoted(list(asked)))
    assert isinstance(placement, Placement)
    assert placement.node == best


@pytest.mark.parametrize("other", ["aa", "xa", "ax", '"a', 'a"'])
def test_a_name_inside_another_is_not_named(other: str) -> None:
    placement = place(packed(5, 6), SHARE, quoted([other, "b"]))
    assert isinstance(placement, Placement)
    assert placement.node == "b"


def test_a_pod_with_wishes_has_them_weighed_among_those_named() -> None:
    fleet, wishes = packed(5, 5, 5), Wishes((Term((Condition("name", "In", ("b",), by_name=True),), 10),))
    placement = place(fleet, SHARE, quoted(["a", "b", "c"]), wishes=wishes)
    assert isinstance(placement, Placement)
    assert placement.node == "b"

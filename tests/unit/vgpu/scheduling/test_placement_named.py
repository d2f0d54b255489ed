"""Candidates that come as the text of a request: the answer is that for the same candidates as strings."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.examples import examples
from tests.unit.vgpu.scheduling.test_placement_views import NODES, fleets, requests
from vgpu.api.inventory import Gpu, Inventory
from vgpu.api.request import GpuRequest, PodRequest
from vgpu.scheduling.fleet import Fleet
from vgpu.scheduling.nodes.constraints import LabelRequirement, Term
from vgpu.scheduling.nodes.name_index import NameIndex, Quoted
from vgpu.scheduling.placement import GUESSES, Placement, place
from vgpu.scheduling.policies.registry import POLICIES
from vgpu.scheduling.preferences import Preferences

SHARE = PodRequest((GpuRequest("main", "share", 1, mib=4),))


def quoted(names: list[str], *, escaped: str = "") -> Quoted:
    """In a body, as kube-scheduler writes it; one of the names with an escape that is not needed."""
    text = json.dumps(names, separators=(",", ":"))
    if escaped:
        text = text.replace(f'"{escaped}"', f'"\\u{ord(escaped[0]):04x}{escaped[1:]}"')
    body = f'{{"NodeNames":{text}}}'.encode()
    return Quoted(body, body.index(b"[") + 1, len(body) - 2)


def packed(*free_mib: int) -> Fleet:
    """Nodes a, b, ... with a GPU each that has so much left."""
    fleet = Fleet()
    for name, mib in zip("abcdefghij", free_mib, strict=False):
        fleet.set_node(name, Inventory((Gpu(f"GPU-{name}", 0, "t4", mib),)))
    return fleet


@settings(max_examples=examples(400), deadline=None)
@given(fleets(), requests(), st.sampled_from(sorted(POLICIES)), st.data())
def test_a_text_of_names_is_answered_as_a_list_of_them(
    fleet: Fleet, request: PodRequest, policy: str, data: st.DataObject
) -> None:
    request = replace(request, policy=policy)
    requested = data.draw(st.lists(st.sampled_from([*NODES, "unknown", "gone"]), unique=True, min_size=1))
    escaped = data.draw(st.sampled_from(["", *requested]))
    assert place(fleet, request, quoted(requested, escaped=escaped)) == place(fleet, request, requested)


@pytest.mark.parametrize(("requested", "best"), [("abcdef", "d"), ("abcef", "c"), ("efabx", "b"), ("afexyz", "a")])
def test_the_best_node_that_is_named_is_found_without_finding_every_name(
    monkeypatch: pytest.MonkeyPatch, requested: str, best: str
) -> None:
    monkeypatch.delattr(NameIndex, "find")
    placement = place(packed(8, 7, 6, 5, 9, 10), SHARE, quoted(list(requested)))
    assert isinstance(placement, Placement)
    assert placement.node == best


@pytest.mark.parametrize(("requested", "best"), [("xyzefg", "e"), ("xyzg", "g"), ("g", "g")])
def test_it_is_found_too_when_it_is_far_down(requested: str, best: str) -> None:
    assert "abcdefg".index(best) >= GUESSES
    placement = place(packed(5, 6, 7, 8, 9, 10, 11), SHARE, quoted(list(requested)))
    assert isinstance(placement, Placement)
    assert placement.node == best


@pytest.mark.parametrize("other", ["aa", "xa", "ax", '"a', 'a"'])
def test_a_name_inside_another_is_not_named(other: str) -> None:
    placement = place(packed(5, 6), SHARE, quoted([other, "b"]))
    assert isinstance(placement, Placement)
    assert placement.node == "b"


def test_a_pod_with_preferences_has_them_weighed_among_those_named() -> None:
    fleet, preferences = (
        packed(5, 5, 5),
        Preferences((Term((LabelRequirement("name", "In", ("b",), by_name=True),), 10),)),
    )
    placement = place(fleet, SHARE, quoted(["a", "b", "c"]), preferences=preferences)
    assert isinstance(placement, Placement)
    assert placement.node == "b"

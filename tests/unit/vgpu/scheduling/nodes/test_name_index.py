"""Finding names in JSON text, against reading it and looking up each."""

from __future__ import annotations

import json
from unittest.mock import patch

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vgpu.api.inventory import Inventory
from vgpu.scheduling.fleet import Fleet
from vgpu.scheduling.nodes import name_index as rosters
from vgpu.scheduling.nodes.name_index import FEW_BYTES, NameIndex, Quoted

NAME = st.text("ab-", max_size=3) | st.text("ab", min_size=6, max_size=26) | st.text('\u00e9",\\ ]\n', max_size=4)
NAMES = st.lists(NAME, max_size=12)


FEW = (-1, FEW_BYTES)
"""All lists that tests look up are looked up by the name index, or one name after another."""


def quoted(text: str) -> Quoted:
    """The inside of a list, in a body."""
    body = f'{{"Pod":{{}},"NodeNames":[{text}]}}'.encode()
    return Quoted(body, body.index(b"[") + 1, len(body) - 2)


def looked_up(names: list[str], known: dict[str, int]) -> tuple[list[int], list[str]]:
    return [known[name] for name in names if name in known], [name for name in names if name not in known]


@given(NAMES, NAMES, st.booleans(), st.booleans(), st.randoms())
def test_names_are_found_as_when_each_is_looked_up(
    there: list[str], more: list[str], ascii_only: bool, spaced: bool, random: object
) -> None:
    known = {name: 3 * at for at, name in enumerate(dict.fromkeys(there))}
    requested = [*there, *more]
    random.shuffle(requested)  # type: ignore[attr-defined]
    text = json.dumps(requested, ensure_ascii=ascii_only, separators=(", ", ":") if spaced else (",", ":"))[1:-1]
    found = NameIndex(known).find(quoted(text))
    if found is not None:
        assert (found.columns.tolist(), list(found.unknown)) == looked_up(requested, known)
    else:
        assert not requested or "\\" in text or (spaced and len(requested) > 1)
    fleet = Fleet()
    for name in known:
        fleet.set_node(name, Inventory(()))
    for few_bytes in FEW:
        with patch.object(rosters, "FEW_BYTES", few_bytes):
            candidates = fleet.look_up(quoted(text))
        assert (candidates.columns.tolist(), list(candidates.unknown)) == looked_up(requested, fleet.column)


BROKEN = [
    '"a"b"', '"a""b"', '"a",,"b"', '"a","b",', ',"a"', '"a', 'a"', '"a";"b"', '"a" "b"', '"a",1', '"\x01"', '"a","\n"', "\\",
    'x"a"', '"a"x', '"a\\","b"',
]  # fmt: skip


@pytest.mark.parametrize("few_bytes", FEW)
@pytest.mark.parametrize("text", BROKEN)
def test_what_is_no_list_of_strings_is_not_read_as_one(
    monkeypatch: pytest.MonkeyPatch, text: str, few_bytes: int
) -> None:
    monkeypatch.setattr(rosters, "FEW_BYTES", few_bytes)
    fleet = Fleet()
    for name in ("a", "b"):
        fleet.set_node(name, Inventory(()))
    with pytest.raises(msgspec.MsgspecError):
        fleet.look_up(quoted(text))


def test_names_that_share_a_place_in_the_table_are_distinguished() -> None:
    name_index = NameIndex({f"node-{number}": number for number in range(500)})
    name_index._place = lambda hashes: np.zeros(len(hashes), np.intp)  # type: ignore[method-assign]
    name_index._table[:] = -1
    name_index._enter(np.zeros(500, np.uint64))
    found = name_index.find(quoted('"node-7","node-499","node-500","node-0"'))
    assert found is not None
    assert (found.columns.tolist(), found.unknown) == ([7, 499, 0], ("node-500",))


@pytest.mark.parametrize("few_bytes", FEW)
def test_a_fleet_finds_the_nodes_that_it_has_now(monkeypatch: pytest.MonkeyPatch, few_bytes: int) -> None:
    monkeypatch.setattr(rosters, "FEW_BYTES", few_bytes)
    fleet = Fleet()
    for name in ("a", "b"):
        fleet.set_node(name, Inventory(()))
    requested = quoted('"a","b","c"')
    assert list(fleet.look_up(requested).unknown) == ["c"]
    fleet.remove_node("a")
    fleet.set_node("c", Inventory(()))
    candidates = fleet.look_up(requested)
    assert (candidates.columns.tolist(), list(candidates.unknown)) == ([fleet.column["b"], fleet.column["c"]], ["a"])


@pytest.mark.parametrize(("inside", "some"), [("", False), (" ", False), ('""', True), ('"a","b"', True)])
def test_whether_there_are_names_is_known_without_reading_them(inside: str, some: bool) -> None:
    text = f"        [{inside}]".encode()
    names = Quoted(text, 9, len(text) - 1)
    assert bool(names) is some
    assert "names" not in vars(names)
    assert bool(names.names) is some

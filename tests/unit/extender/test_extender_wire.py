"""Reading a filter call: quickly when the list of nodes is that of the last call, and always as a plain reader would."""

from __future__ import annotations

import gc
import json
import weakref
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from extender import collecting
from extender.wire import FilterArgs, FilterReader
from tests.builders import pod

ASKING = pod("a").asking(mib=8192).plain()


def body(names: Any = ("n1", "n2"), *, asking: Any = ASKING) -> bytes:
    """As Go's encoder writes it."""
    return json.dumps({"Pod": asking, "Nodes": None, "NodeNames": names}, separators=(",", ":")).encode()


def test_the_same_names_are_the_same_tuple_whatever_the_pod() -> None:
    reader = FilterReader()
    first = reader.read(body())
    second = reader.read(body(asking=pod("b").plain()))
    assert second.node_names is first.node_names == ("n1", "n2")
    assert (first.pod.metadata.name, second.pod.metadata.name) == ("a", "b")
    assert reader.read(body(["n2", "n1"])).node_names == ("n2", "n1")


TRAPS = [
    body(None), body([]), body(['","NodeNames":["x"]}']), body() + b"\n", b'{"Pod":{}}', b'{"NodeNames":["n1"],"Pod":{}}',
    b'{"Pod":{"x":1,"NodeNames":["x"]}}', b'{"Pod":{"x":{"y":1,"NodeNames":["x"]}},"NodeNames":["n1"]}',
    b'{"Pod":{"x":1,"NodeNames":["n1","n2"]}}', b'{"Pod":{},"NodeNames":["n1"],"More":[1]}',
    body(asking=pod("a").annotated(note=',"NodeNames":["n1","n2"]}').plain()),
    b"", b"{", b"[]", b'{"Pod":7}', b"\xff", b"null", b',"NodeNames":["n1","n2"]}', b'{"NodeNames":["n1","n2"]}',
]  # fmt: skip


@given(st.lists(st.sampled_from([body(), *TRAPS]), min_size=1, max_size=4))
def test_whatever_came_before_a_body_reads_as_a_plain_reader_reads_it(bodies: list[bytes]) -> None:
    reader = FilterReader()
    for one in bodies:
        try:
            plain = msgspec.json.decode(one, type=FilterArgs)
        except (msgspec.MsgspecError, UnicodeDecodeError):
            with pytest.raises((msgspec.MsgspecError, UnicodeDecodeError)):
                reader.read(one)
        else:
            assert reader.read(one) == plain


class Ring:
    """Refers to itself: only a look for cycles can free it."""

    def __init__(self) -> None:
        self.me = self


def test_what_was_set_aside_is_not_looked_at_again_until_the_hour() -> None:
    before = gc.get_threshold()
    try:
        collecting.begin()
        assert gc.get_threshold()[0] == collecting.YOUNG
        gc.unfreeze()
        collecting.tidy(1)
        assert gc.get_freeze_count() == 0
        collecting.tidy(collecting.EACH_S)
        assert gc.get_freeze_count() > 0
        ring = Ring()
        gc.freeze()
        gone = weakref.ref(ring)
        del ring
        collecting.tidy(collecting.EACH_S)
        assert gone() is not None
        collecting.tidy(collecting.WHOLE_EACH_S)
        assert gone() is None
    finally:
        gc.unfreeze()
        gc.set_threshold(*before)

"""Reading a filter call and writing its answer: quickly, and always as a plain reader and writer would."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from extender.protocol import FilterReader, FilterResult
from kube.objects import Pod
from tests.builders import pod
from vgpu.scheduling.nodes.name_index import Quoted


class Plain(msgspec.Struct):
    """ExtenderArgs, read at once."""

    pod: Pod = msgspec.field(name="Pod")
    node_names: list[str] | None = msgspec.field(name="NodeNames", default=None)


ASKING = pod("a").asking(mib=8192).plain()


def body(names: Any = ("n1", "n2"), *, asking: Any = ASKING) -> bytes:
    """As Go's encoder writes it."""
    return json.dumps({"Pod": asking, "Nodes": None, "NodeNames": names}, separators=(",", ":")).encode()


TRAPS = [
    body(None), body([]), body(['","NodeNames":["x"]}']), body() + b"\n", b'{"Pod":{}}', b'{"NodeNames":["n1"],"Pod":{}}',
    b'{"Pod":{"x":1,"NodeNames":["x"]}}', b'{"Pod":{"x":{"y":1,"NodeNames":["x"]}},"NodeNames":["n1"]}',
    b'{"Pod":{"x":1,"NodeNames":["n1","n2"]}}', b'{"Pod":{},"NodeNames":["n1"],"More":[1]}',
    body(asking=pod("a").annotated(note=',"NodeNames":["n1","n2"]}').plain()),
    b"", b"{", b"[]", b'{"Pod":7}', b"\xff", b"null", b',"NodeNames":["n1","n2"]}', b'{"NodeNames":["n1","n2"]}',
]  # fmt: skip


@given(st.sampled_from([body(), *TRAPS]) | st.lists(st.text(max_size=4)).map(body))
def test_a_body_reads_as_a_plain_reader_reads_it(one: bytes) -> None:
    def read() -> tuple[str, list[str] | None]:
        args = FilterReader().read(one)
        return args.pod.metadata.name, None if args.node_names is None else list(args.node_names)

    try:
        plain = msgspec.json.decode(one, type=Plain)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        with pytest.raises((msgspec.MsgspecError, UnicodeDecodeError)):
            read()
    else:
        assert read() == (plain.pod.metadata.name, plain.node_names)


def test_the_names_of_a_body_as_go_writes_it_stay_bytes() -> None:
    assert isinstance(FilterReader().read(body()).node_names, Quoted)


NODES = st.lists(st.text('",:\\a\n\u00e9\U0001f600', max_size=6), max_size=4, unique=True)


@given(NODES, NODES, st.text('",:\\a\n', max_size=4))
def test_an_answer_has_the_reason_of_every_node_and_no_more(kept: list[str], lost: list[str], why: str) -> None:
    other = [node for node in lost if node not in kept]
    answer = FilterResult(["n"], {f"{why}1": kept, f"{why}2": other}, {why: lost}, "no")
    assert json.loads(answer.to_json()) == {
        "NodeNames": ["n"],
        "FailedNodes": dict.fromkeys(kept, f"{why}1") | dict.fromkeys(other, f"{why}2"),
        "FailedAndUnresolvableNodes": dict.fromkeys(lost, why),
        "Error": "no",
    }


def test_an_answer_without_nodes_has_an_empty_list_and_not_null() -> None:
    assert json.loads(FilterResult().to_json())["NodeNames"] == []

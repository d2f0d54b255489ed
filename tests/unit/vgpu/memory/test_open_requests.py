"""Requests to open memory of another process."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vgpu.api.errors import BadDocument
from vgpu.memory.open_requests import ASKED_LIMIT, EXPORT_WAIT_S, ExportedPart, OpenRequest, OpenRequests

HANDLE = bytes(64)


def a_request(opener: str = "guest", exporter: str | None = "maker", until_s: float = EXPORT_WAIT_S) -> OpenRequest:
    return OpenRequest(opener, 1, HANDLE, 0, exporter, until_s)


def begun(requests: OpenRequests, request: OpenRequest) -> int:
    number = requests.begin(request)
    assert number is not None
    return number


@st.composite
def parts(draw: st.DrawFn) -> list[ExportedPart]:
    """A whole answer."""
    blocks = draw(st.lists(st.integers(1, 9), min_size=1, max_size=20))
    cuts = sorted(draw(st.sets(st.integers(1, len(blocks) - 1)))) if len(blocks) > 1 else []
    ends = list(zip([0, *cuts], [*cuts, len(blocks)], strict=True))
    return [ExportedPart(sum(blocks), len(blocks), first, tuple(blocks[first:end])) for first, end in ends]


def accepted(answer: list[ExportedPart]) -> bool:
    """The obvious rule: all blocks once, in order, of the size that was stated."""
    blocks = [block for part in answer for block in part.blocks]
    firsts = [sum(len(part.blocks) for part in answer[:n]) for n in range(len(answer))]
    return (
        len({(part.bytes, part.total) for part in answer}) == 1
        and [part.first for part in answer] == firsts
        and (len(blocks), sum(blocks)) == (answer[0].total, answer[0].bytes)
    )


@given(parts(), st.data())
def test_an_answer_is_accepted_if_its_parts_are_one_whole(answer: list[ExportedPart], data: st.DataObject) -> None:
    if data.draw(st.booleans()):
        at = data.draw(st.integers(0, len(answer) - 1))
        name = data.draw(st.sampled_from(["bytes", "total", "first"]))
        fields = {one: getattr(answer[at], one) for one in ("bytes", "total", "first", "blocks")}
        answer[at] = ExportedPart(**{**fields, name: max(0, fields[name] + data.draw(st.sampled_from([-1, 1])))})
    requests = OpenRequests()
    number = begun(requests, a_request())
    try:
        ended = [requests.answered("maker", number, part) is not None for part in answer]
    except BadDocument:
        assert not accepted(answer)
        return
    assert accepted(answer) == (all(ended) and len(requests) == 0)


def test_a_process_has_one_request_and_another_owes_so_many_exports() -> None:
    requests = OpenRequests()
    for number in range(ASKED_LIMIT):
        begun(requests, a_request(f"guest {number}"))
    with pytest.raises(BadDocument, match="one at a time"):
        requests.begin(a_request("guest 0", "other"))
    assert requests.begin(a_request("one more")) is None
    assert requests.begin(a_request("one more", "other")) is not None
    assert requests.asked("maker") == ASKED_LIMIT


def test_the_end_of_either_process_ends_a_request() -> None:
    requests = OpenRequests()
    begun(requests, a_request("guest", "maker"))
    waits = a_request("other", "maker")
    begun(requests, waits)
    assert requests.left("guest") == []
    assert requests.left("maker") == [waits]
    assert len(requests) == 0


def test_a_request_ends_when_its_time_is_up() -> None:
    requests = OpenRequests()
    number = begun(requests, a_request())
    assert requests.due_s() == EXPORT_WAIT_S
    assert requests.expired(EXPORT_WAIT_S - 0.1) == []
    assert len(requests.expired(EXPORT_WAIT_S)) == 1
    assert requests.answered("maker", number, ExportedPart(1, 1, 0, (1,))) is None
    assert requests.due_s() is None


def test_a_refusal_ends_a_request_in_the_middle_of_its_answer() -> None:
    requests = OpenRequests()
    number = begun(requests, a_request())
    requests.answered("maker", number, ExportedPart(2, 2, 0, (1,)))
    assert requests.answered("maker", number, None) is not None
    assert len(requests) == 0

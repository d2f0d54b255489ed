"""An answer's head and body go to the kernel together, and nothing of either is lost or late."""

from __future__ import annotations

import asyncio
from typing import cast

import pytest

from observe.with_head import JOINED_BYTES, WithHead

HEAD = b"HTTP/1.1 200 OK\r\n\r\n"


class Transport:
    """Keeps what is written."""

    def __init__(self) -> None:
        self.writes: list[bytes] = []
        self.closed = False

    def write(self, data: bytes) -> None:
        assert not self.closed
        self.writes.append(data)

    def close(self) -> None:
        self.closed = True

    def is_closing(self) -> bool:
        return self.closed


def written(*parts: bytes, close: bool = False) -> Transport:
    transport = Transport()
    answer = WithHead(cast(asyncio.Transport, transport))
    for part in parts:
        answer.write(part)
    if close:
        answer.close()
    else:
        answer.flush()
    return transport


@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        ((HEAD, b"body"), [HEAD + b"body"]),
        ((HEAD, b""), [HEAD]),
        ((HEAD,), [HEAD]),
        ((HEAD, b"one", b"two", b"three"), [HEAD + b"one", b"two", b"three"]),
        ((HEAD, b"a" * JOINED_BYTES), [HEAD + b"a" * JOINED_BYTES]),
        ((HEAD, b"a" * (JOINED_BYTES + 1)), [HEAD, b"a" * (JOINED_BYTES + 1)]),
        ((HEAD * JOINED_BYTES, b"body"), [HEAD * JOINED_BYTES, b"body"]),
        ((), []),
    ],
    ids=["body", "empty", "head alone", "chunks", "largest", "larger", "large head", "nothing"],
)
def test_the_head_goes_with_the_first_of_the_body(parts: tuple[bytes, ...], expected: list[bytes]) -> None:
    assert [one for one in written(*parts).writes if one] == expected


def test_a_large_head_is_written_before_there_is_a_body() -> None:
    transport = Transport()
    WithHead(cast(asyncio.Transport, transport)).write(HEAD * JOINED_BYTES)
    assert transport.writes == [HEAD * JOINED_BYTES]


def test_an_answer_that_ends_without_its_body_has_its_head() -> None:
    transport = written(HEAD, close=True)
    assert transport.writes == [HEAD]
    assert transport.closed

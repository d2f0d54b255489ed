"""One page for operators or the kubelet as a value, and how it travels from a program to the process that serves it.

    request   u32 number, u8 index in PATHS or REVIEW, u16 bytes of the token, u32 refusals so far for each of REASONS, the token
    answer    u32 number, u16 status, u16 bytes of the content type, u32 bytes of the body, content type, body

Little-endian, over a stream socket.
"""

from __future__ import annotations

from dataclasses import dataclass
from struct import Struct
from typing import Final

from observe.refusals import REASONS

PATHS: Final = ("/metrics", "/healthz", "/readyz")
REVIEW: Final = len(PATHS)
"""Index of a request to review whether the token may read /metrics: 200, 401, 403, or 503 where that is unknown."""
TEXT: Final = "text/plain; charset=utf-8"

REQUEST: Final = Struct(f"<IBH{len(REASONS)}I")
ANSWER: Final = Struct("<IHHI")


@dataclass(frozen=True, slots=True)
class Page:
    """An HTTP answer."""

    status: int
    content_type: str
    body: bytes


def packed(number: int, page: Page) -> bytes:
    """The answer to the request of this number."""
    content_type = page.content_type.encode()
    return ANSWER.pack(number, page.status, len(content_type), len(page.body)) + content_type + page.body


def text(status: int, sentence: str) -> Page:
    """An answer of one line."""
    return Page(status, TEXT, f"{sentence}\n".encode())


def unknown(path: str) -> Page:
    """The answer to a path that is none of ours."""
    return text(404, f"{path}: there are {', '.join(PATHS)}")

"""The extender's HTTP application: what it reports to the server about a request."""

from __future__ import annotations

from http import HTTPStatus
from inspect import isawaitable
from types import SimpleNamespace
from typing import Any, cast

import pytest

from extender.server import scheduler_app
from extender.verbs import VerbResponse, Verbs
from observe.protocol import UNREADABLE
from observe.serving import Message


class Says:
    """Verbs that read a request or do not."""

    async def filter(self, body: bytes) -> VerbResponse:
        return VerbResponse(b"{}", unreadable=body != b"{}")


@pytest.mark.parametrize(("body", "unreadable"), [(b"{}", False), (b"\0\0", True)])
async def test_a_request_that_is_no_schedulers_is_answered_200_and_counts_as_of_no_use(
    body: bytes, unreadable: bool
) -> None:
    scope: Message = {"method": "POST", "path": "/filter"}
    sent: list[Message] = []

    async def receive() -> Message:
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message: Message) -> None:
        sent.append(message)

    await scheduler_app(cast(Verbs, cast(Any, Says())))(scope, receive, send)
    assert [sent[0]["status"], sent[1]["body"], scope[UNREADABLE]] == [HTTPStatus.OK, b"{}", unreadable]


def verbs_of(state: Any, not_ready: str | None = None) -> Verbs:
    metrics: Any = SimpleNamespace(count=lambda *_: None)
    preemption: Any = SimpleNamespace(verb=SimpleNamespace(deadline=lambda: 0.0))
    return Verbs(state, cast(Any, None), preemption, cast(Any, None), metrics, cast(Any, None), lambda: not_ready)


@pytest.mark.parametrize("verb", ["filter", "prioritize", "spare", "bind", "preempt"])
async def test_a_request_that_was_not_read_for_the_extender_is_not_ready_counts_as_of_no_use(verb: str) -> None:
    answer = getattr(verbs_of(None, "the nodes are not known yet"), verb)(b"nonsense")
    assert (await answer if isawaitable(answer) else answer).unreadable

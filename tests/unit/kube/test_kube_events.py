"""Events: written once, counted afterwards, and never blocking."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec

from kube.client import Client
from kube.errors import ApiError
from kube.events import BURST, QUEUE, REFILL_S, SERIES_S, Recorder, about
from kube.objects import Pod
from tests.builders import node, pod


class Sent(Client):
    """A client that keeps what it should send."""

    def __init__(self) -> None:
        self.sent: list[tuple[str, str, dict[str, Any]]] = []
        self.error: ApiError | None = None

    async def send(self, method: str, path: str, body: object = None, **_: Any) -> bytes:  # type: ignore[override]
        if self.error is not None:
            error, self.error = self.error, None
            raise error
        self.sent.append((method, path, msgspec.to_builtins(body)))
        return b"{}"


@asynccontextmanager
async def recording(client: Sent, now: list[float]) -> AsyncIterator[Recorder]:
    recorder = Recorder(client, "tangram-extender", "pod-1", clock=lambda: now[0])
    task = asyncio.create_task(recorder.run())
    yield recorder
    await recorder.flush()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


A = about(pod("a", "team").build())


class DetailedPod(Pod, frozen=True):
    """Of a program that decodes more of a pod."""


def test_a_pod_is_a_pod_whatever_a_program_decodes_of_it() -> None:
    """`kubectl describe` looks for Events by the kind."""
    assert about(msgspec.json.decode(pod("a", "team").json(), type=DetailedPod)) == A
    assert (A.kind, about(node("n1").build()).kind) == ("Pod", "Node")


async def test_an_event_has_what_the_api_requires() -> None:
    client = Sent()
    async with recording(client, [0.0]) as recorder:
        recorder.event(A, "Assigned", "on GPU-1", "Warning", action="Binding")
    ((method, path, body),) = client.sent
    assert (method, path) == ("POST", "/apis/events.k8s.io/v1/namespaces/team/events")
    assert body["eventTime"].endswith("Z")
    assert len(body["eventTime"]) == len("2026-01-01T00:00:00.000000Z")
    expected = {
        "action": "Binding", "reason": "Assigned", "note": "on GPU-1", "type": "Warning",
        "reportingController": "tangram-extender", "reportingInstance": "pod-1",
        "regarding": {"kind": "Pod", "namespace": "team", "name": "a", "uid": "uid-team-a"},
    }  # fmt: skip
    assert (
        expected.items()
        <= (body | {"regarding": {k: v for k, v in body["regarding"].items() if k != "apiVersion"}}).items()
    )


async def test_the_same_thing_again_is_counted_on_the_first_event() -> None:
    client, now = Sent(), [0.0]
    async with recording(client, now) as recorder:
        for _ in range(3):
            recorder.event(A, "Assigned", "on GPU-1")
        await recorder.flush()
        now[0] = SERIES_S
        recorder.event(A, "Assigned", "on GPU-1")
        await recorder.flush()
        assert recorder.statistics().written == 2
        assert recorder.statistics().counted == 2
    assert [method for method, _, _ in client.sent] == ["POST", "PATCH", "PATCH", "POST"]
    assert client.sent[2][2]["series"]["count"] == 3
    assert client.sent[1][1].endswith(client.sent[0][2]["metadata"]["name"])


async def test_a_series_costs_few_writes_and_leaves_the_object_its_other_events() -> None:
    client, now = Sent(), [0.0]
    async with recording(client, now) as recorder:
        for at in range(550):  # a container whose process is killed each second
            now[0] = float(at)
            recorder.event(A, "LimitBypassed", f"process {at} was killed", "Warning", series="killed")
            await recorder.flush()
        recorder.event(A, "LimitBypassed", "it is reported", "Warning", series="report")
        recorder.event(A, "LimitNotEnforced", "x", "Warning")
        await recorder.flush()
        assert recorder.statistics().dropped == 0
        assert recorder.statistics().written + recorder.statistics().counted == 552
        now[0] = SERIES_S
        recorder.event(A, "LimitBypassed", "process 550 was killed", "Warning", series="killed")
    posts = [body["note"] for method, _, body in client.sent if method == "POST"]
    assert posts == ["process 0 was killed", "it is reported", "x", "process 550 was killed"]
    counts = [body["series"]["count"] for method, _, body in client.sent if method == "PATCH"]
    assert counts == [2, 4, 8, 16, 32, 64, 128, 256, 512]


async def test_a_series_goes_on_counting_while_its_object_is_slowed_down() -> None:
    client, now = Sent(), [0.0]
    async with recording(client, now) as recorder:
        recorder.event(A, "LimitBypassed", "process 0 was killed", series="killed")
        for at in range(BURST):
            recorder.event(A, "Assigned", f"note {at}")
        for at in range(6):
            recorder.event(A, "LimitBypassed", f"process {at} was killed", series="killed")
        await recorder.flush()
        now[0] = REFILL_S
        recorder.event(A, "LimitBypassed", "process 7 was killed", series="killed")
    assert [body["series"]["count"] for method, _, body in client.sent if method == "PATCH"] == [8]


async def test_a_series_whose_event_is_gone_begins_again() -> None:
    client = Sent()
    async with recording(client, [0.0]) as recorder:
        recorder.event(A, "Assigned", "x")
        await recorder.flush()
        client.error = ApiError(404, "NotFound", "gone")
        recorder.event(A, "Assigned", "x")
    assert [method for method, _, _ in client.sent] == ["POST", "POST"]


async def test_an_object_that_is_talked_about_too_much_is_slowed_down_alone() -> None:
    client, now = Sent(), [0.0]
    other = about(node("n1").build())
    async with recording(client, now) as recorder:
        for at in range(BURST + 5):
            recorder.event(A, "Assigned", f"note {at}")
        recorder.event(other, "Assigned", "x")
        await recorder.flush()
        assert recorder.statistics().dropped == 5
        assert len(client.sent) == BURST + 1
        now[0] = REFILL_S
        recorder.event(A, "Assigned", "again")
        await recorder.flush()
        assert len(client.sent) == BURST + 2
    assert client.sent[BURST][1] == "/apis/events.k8s.io/v1/namespaces/default/events", "a node's events are in default"


async def test_a_refused_event_is_counted_and_the_next_is_written() -> None:
    client = Sent()
    async with recording(client, [0.0]) as recorder:
        client.error = ApiError(403, "Forbidden", "no")
        recorder.event(A, "Assigned", "x")
        recorder.event(A, "Assigned", "y")
        await recorder.flush()
        assert recorder.statistics().dropped == 1
        assert recorder.statistics().written == 1


async def test_recording_never_waits_even_when_nothing_is_written() -> None:
    recorder = Recorder(Sent(), "tangram-extender", "pod-1")
    for at in range(QUEUE + 3):
        recorder.event(A, "Assigned", f"note {at}")
    assert recorder.statistics().dropped == 3

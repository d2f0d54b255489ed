"""Conditions of pods: what is written, when it is taken back, and what a slow watch or a refusing API server changes."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from deviceplugin.pods.conditions import (
    LAG_S,
    LINGER_S,
    MESSAGE_LIMIT,
    OVER,
    REFUSED_S,
    RETRY_S,
    PodConditions,
    Violated,
    due,
    violated,
)
from deviceplugin.pods.limit_violations import BYPASSED, REASON, STRANDED, LimitViolation
from kube.client import STRATEGIC_PATCH
from kube.errors import ApiError
from kube.objects import Condition, Pod
from tests.builders import pod
from vgpu.api.names import DEFAULT

TYPES = (DEFAULT.memory_stranded, DEFAULT.memory_over_limit)


def violation(
    name: str = "a", reason: str = STRANDED, container: str = "main", note: str = "no room"
) -> LimitViolation:
    return LimitViolation(f"uid-default-{name}", container, "keep", note, reason)


class WrittenPods:
    """Pods of a node, as their API server has them. `lags`: the watch does not bring what is written."""

    def __init__(self, *names: str) -> None:
        self.pods: dict[str, Pod] = {one.uid: one for one in (pod(name).build() for name in names or "a")}
        self.sent: list[tuple[str, str, str]] = []
        """Pod, type, status."""
        self.bodies: list[Any] = []
        self.errors: list[ApiError] = []
        self.lags = False
        self.at_s = 1000.0
        self.conditions = PodConditions(
            self,
            lambda: self.pods,
            DEFAULT,
            clock=lambda: self.at_s,
            today=lambda: datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC),
        )

    async def send(self, method: str, path: str, body: Any = None, *, content_type: str) -> bytes:
        assert (method, content_type) == ("PATCH", STRATEGIC_PATCH)
        if self.errors:
            raise self.errors.pop(0)
        name = path.removeprefix("/api/v1/namespaces/default/pods/").removesuffix("/status")
        self.bodies.append(body)
        uid = body["metadata"]["uid"]
        self.sent += [(name, one["type"], one["status"]) for one in body["status"]["conditions"]]
        if not self.lags:
            mine = {one.type: one for one in self.pods[uid].status.conditions}
            mine |= {
                c["type"]: Condition(c["type"], c["status"], c["reason"], c["message"])
                for c in body["status"]["conditions"]
            }
            self.bring(uid, *mine.values())
        return b"{}"

    def bring(self, uid: str, *conditions: Condition) -> None:
        """The watch brings it with these."""
        one = self.pods[uid]
        self.pods[uid] = replace(one, status=replace(one.status, conditions=conditions))

    async def shows(self, *found: LimitViolation, after_s: float = 1.0) -> list[tuple[str, str, str]]:
        """The status shows these; what is written then."""
        self.at_s += after_s
        self.conditions.follow(found)
        before = len(self.sent)
        await self.conditions.once()
        return self.sent[before:]


async def test_stranded_memory_is_a_condition_from_the_first_reading_on_and_is_written_once() -> None:
    made = WrittenPods()
    assert await made.shows(violation()) == [("a", DEFAULT.memory_stranded, "True")]
    assert await made.shows(violation(note="other numbers")) == []
    assert made.bodies == [
        {
            "metadata": {"uid": "uid-default-a"},
            "status": {
                "conditions": [
                    {
                        "type": "tangram.sh/GpuMemoryStranded", "status": "True", "reason": "MemoryStranded", "message": "no room",
                        "lastTransitionTime": "2026-01-02T03:04:05Z",
                    }
                ]
            },
        }
    ]  # fmt: skip


async def test_it_is_false_when_the_status_has_not_shown_it_for_a_while() -> None:
    made = WrittenPods()
    await made.shows(violation())
    assert await made.shows(after_s=LINGER_S - 1) == []
    await made.shows(violation(), after_s=0)
    assert await made.shows(after_s=LINGER_S - 1) == [], "it was there again meanwhile"
    assert await made.shows(after_s=1) == [("a", DEFAULT.memory_stranded, "False")]
    assert made.bodies[-1]["status"]["conditions"][0]["reason"] == OVER
    assert await made.shows(violation()) == [("a", DEFAULT.memory_stranded, "True")]


async def test_a_plugin_that_starts_anew_takes_back_what_does_not_hold_any_more_and_keeps_what_does() -> None:
    made = WrittenPods("a", "b")
    for uid in made.pods:
        made.bring(uid, Condition("Ready", "True"), Condition(DEFAULT.memory_stranded, "True"))
    assert await made.shows(violation("a")) == [("b", DEFAULT.memory_stranded, "False")]
    assert made.pods["uid-default-b"].status.conditions[0] == Condition("Ready", "True")


@pytest.mark.parametrize(("reason", "kind"), [(REASON, 1), (BYPASSED, 1), (STRANDED, 0)])
async def test_each_violation_has_its_type(reason: str, kind: int) -> None:
    made = WrittenPods()
    assert await made.shows(violation(reason=reason)) == [("a", TYPES[kind], "True")]


async def test_a_watch_that_lags_makes_no_second_write_and_one_that_lost_it_does() -> None:
    made = WrittenPods()
    made.lags = True
    await made.shows(violation())
    assert await made.shows(violation(), after_s=LAG_S - 1) == []
    assert await made.shows(violation(), after_s=1) == [("a", DEFAULT.memory_stranded, "True")]


@pytest.mark.parametrize(
    ("status", "wait_s"),
    [(0, RETRY_S), (500, RETRY_S), (401, RETRY_S), (403, REFUSED_S), (422, REFUSED_S), (409, RETRY_S)],
)
async def test_a_write_that_failed_is_tried_again_and_others_are_not_kept_waiting(status: int, wait_s: float) -> None:
    made = WrittenPods("a", "b")
    made.errors = [ApiError(status, "No", "not now", verb="PATCH", path="/x")]
    both = violation("a"), violation("b")
    assert await made.shows(*both) == [("b", DEFAULT.memory_stranded, "True")]
    assert await made.shows(*both, after_s=wait_s - 1) == []
    assert await made.shows(*both, after_s=1) == [("a", DEFAULT.memory_stranded, "True")]


async def test_pods_that_have_ended_or_are_gone_get_no_condition() -> None:
    made = WrittenPods()
    assert await made.shows(violation("unknown")) == []
    made.pods = {one.uid: one for one in [pod("a").with_phase("Failed").build()]}
    assert await made.shows(violation("a")) == []


def test_of_several_containers_the_first_is_named_and_the_others_are_counted() -> None:
    found = violated(
        [violation(container="x"), violation(container="y"), violation(container="y", reason=REASON)], DEFAULT
    )
    (kinds,) = found.values()
    assert kinds[DEFAULT.memory_stranded] == Violated(STRANDED, "no room; and 1 more containers of the pod")
    assert kinds[DEFAULT.memory_over_limit] == Violated(REASON, "no room")
    long = violated([violation(note="x" * 5000)], DEFAULT)
    assert len(long["uid-default-a"][DEFAULT.memory_stranded].message) == MESSAGE_LIMIT


HELD = st.sampled_from(["", "True", "False"])


@given(st.tuples(HELD, HELD), st.sets(st.sampled_from(TYPES)), st.sets(st.sampled_from(TYPES)))
def test_after_what_is_due_is_written_each_condition_says_what_holds(
    held: tuple[str, str], now: set[str], lingering: set[str]
) -> None:
    there = {kind: Condition(kind, status) for kind, status in zip(TYPES, held, strict=True) if status}
    shown = {kind: Violated(STRANDED, "no room") for kind in now}
    written = {one.type: one for one in due(there.values(), shown, lingering, TYPES)}
    after = there | written
    for kind, before in zip(TYPES, held, strict=True):
        true = after.get(kind, Condition(kind)).status == "True"
        assert true == (kind in now or (kind in lingering and before == "True"))
        assert kind not in written or written[kind].status != before, "nothing is written that is there"
    assert not list(due(after.values(), shown, lingering, TYPES))

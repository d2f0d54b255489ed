"""A Workload of Kueue that is evicted as a whole: deactivated, with all its pods, or not at all."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from extender.preemption import kueue_victims, planner
from extender.preemption.kueue_pods import KueuePods
from extender.preemption.kueue_victims import VAIN_S
from extender.settings import Settings
from kube.errors import ApiError
from kube.objects import MetadataOnly
from tests.builders import PodBuilder, pod, workload
from tests.unit.extender.extender_parts import FULL_MIB, HALF_MIB, ExtenderParts
from tests.unit.extender.preemption.test_evictor import bound, looked, looking, until, urgent
from vgpu.scheduling.victims.victim_search import VictimSearch
from vgpu.scheduling.victims.workloads import WorkloadEviction, least_workload_eviction

WHOLE = Settings(_cli_parse_args=False, kueue=True, kueue_evict="whole")  # type: ignore[call-arg]
NEVER = Settings(_cli_parse_args=False, kueue=True)  # type: ignore[call-arg]
PATH = "/apis/kueue.x-k8s.io/v1beta2/namespaces/default/workloads"


class Queued:
    """n1 and n2 with two GPUs each. On n1 two jobs have half of a GPU each: their totals leave a GPU, and no single one is free."""

    def __init__(self, settings: Settings = WHOLE) -> None:
        self.parts = ExtenderParts(settings, n1=2, n2=2)
        assert self.parts.preemption.kueue_pods is not None
        self.kueue_pods: KueuePods = self.parts.preemption.kueue_pods
        self.kueue_pods.workloads._cache.has_synced.set()
        self.kueue_pods.workloads._cache.heard_s = float("inf")
        self.patches: list[tuple[str, dict[str, Any]]] = []
        self.refusal: ApiError | None = None
        self.refused = 0
        self.parts.server.answer = self.answer
        for name in ("one", "two"):
            self.queue(workload(name, f"uid-{name}"))
        self.run("a", "one", "n1", 0, priority=3)
        self.run("a-too", "one", "n2", 0)
        self.run("b", "two", "n1", 1)

    def answer(self, method: str, path: str, body: Any) -> bytes:
        if method == "PATCH" and "/workloads/" in path:
            if self.refusal is not None:
                self.refused += 1
                raise self.refusal
            self.patches.append((path, body))
        return b"{}"

    def queue(self, thing: dict[str, Any]) -> None:
        new = msgspec.convert(thing | {"metadata": thing["metadata"] | {"resourceVersion": "1"}}, MetadataOnly)
        self.kueue_pods.workloads._cache._items[new.metadata.key] = new
        self.kueue_pods.workloads._changed(None, new)

    def run(self, name: str, job: str, node: str, row: int, *, priority: int = 0) -> None:
        self.parts.report(bound(name, node, HALF_MIB, priority, row).controlled_by("Job", job))

    def needs_gpu(self, built: PodBuilder | None = None, *names: str) -> None:
        self.parts.report(built or urgent())
        assert not self.parts.filter(built or urgent(), *(names or ("n1",))).node_names

    @property
    def deactivated(self) -> list[str]:
        return [path.rpartition("/")[2] for path, _ in self.patches]


async def test_the_cheaper_workload_is_deactivated_and_no_pod_of_it_is_evicted(monkeypatch: pytest.MonkeyPatch) -> None:
    queued = Queued()
    async with looking(queued.parts, monkeypatch) as task:
        queued.needs_gpu()
        await until(task, lambda: bool(queued.patches))
        queued.needs_gpu()
        await looked(queued.parts, task)
    body = {"metadata": {"uid": "uid-default-two"}, "spec": {"active": False}}
    assert queued.patches == [(f"{PATH}/two", body)], "that of one pod, and once"
    assert "b" not in queued.parts.server.evictions()
    reservation = queued.parts.preemption.reservations.get("uid-default-urgent")
    assert reservation is not None
    assert (reservation.node, reservation.nominated) == ("n1", True)
    assert queued.parts.preemption.evicted() == 1


async def test_it_is_deactivated_beside_a_pod_that_leaves_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    queued = Queued()
    queued.parts.report(bound("stays", "n1", HALF_MIB, priority=5000, row=0))
    queued.parts.report(bound("leaves", "n1", HALF_MIB, row=1).terminating())
    async with looking(queued.parts, monkeypatch) as task:
        queued.needs_gpu()
        await looked(queued.parts, task)
    assert queued.deactivated == ["two"]


async def test_it_costs_what_its_pods_on_other_nodes_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    queued = Queued()
    queued.run("b-too", "two", "n2", 1, priority=5)
    async with looking(queued.parts, monkeypatch) as task:
        queued.needs_gpu()
        await until(task, lambda: bool(queued.patches))
    assert queued.deactivated == ["one"]


async def test_nothing_is_remembered_of_a_pod_that_goes_while_a_workload_is_deactivated_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    queued = Queued()
    answer = queued.answer

    def goes(method: str, path: str, body: Any) -> bytes:
        if "/workloads/" in path:
            queued.parts.end("urgent")
        return answer(method, path, body)

    queued.parts.server.answer = goes
    async with looking(queued.parts, monkeypatch) as task:
        queued.needs_gpu()
        await until(task, lambda: bool(queued.patches))
        await looked(queued.parts, task)
    evictor = queued.parts.preemption._evictor
    assert "uid-default-urgent" not in evictor._ending.keys() | evictor._plans.keys()


async def test_one_that_was_deactivated_in_vain_is_not_chosen_again_for_an_hour(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its pods are not ended: Kueue does not run, for example."""
    queued = Queued()

    def lapse() -> None:
        queued.parts.now_s += queued.parts.preemption.verb._remember_s + 1
        queued.parts.preemption.expire()

    async with looking(queued.parts, monkeypatch) as task:
        for count in (1, 2):
            queued.needs_gpu()
            await until(task, lambda count=count: len(queued.patches) == count)  # type: ignore[misc]
            lapse()
        queued.needs_gpu()
        await looked(queued.parts, task)
        assert queued.deactivated == ["two", "one"]
        queued.parts.now_s += VAIN_S
        queued.needs_gpu()
        await until(task, lambda: len(queued.patches) == 3)
    assert queued.deactivated == ["two", "one", "two"]


async def test_one_whose_pods_ended_was_not_deactivated_in_vain(monkeypatch: pytest.MonkeyPatch) -> None:
    queued = Queued()
    async with looking(queued.parts, monkeypatch) as task:
        queued.needs_gpu()
        await until(task, lambda: bool(queued.patches))
        queued.parts.end("b")
        queued.parts.now_s += queued.parts.preemption.verb._remember_s + 1
        queued.parts.preemption.expire()
        queued.run("b-again", "two", "n1", 1)
        queued.needs_gpu()
        await until(task, lambda: len(queued.patches) == 2)
    assert queued.deactivated == ["two", "two"]


async def test_its_capacity_is_reserved_for_the_pod_as_it_comes_free(monkeypatch: pytest.MonkeyPatch) -> None:
    queued = Queued()
    async with looking(queued.parts, monkeypatch) as task:
        queued.needs_gpu()
        await until(task, lambda: bool(queued.patches))
    queued.parts.end("b")
    assert not queued.parts.filter(pod("other").asking(mib=FULL_MIB), "n1").node_names
    assert queued.parts.filter(urgent(), "n1").node_names == ["n1"]


def too_high(queued: Queued) -> None:
    for name, job in (("a-high", "one"), ("b-high", "two")):
        queued.run(name, job, "n2", 1, priority=1000)


def in_doubt(queued: Queued) -> None:
    queued.run("c", "unread", "n2", 1)


def with_two_workloads(queued: Queued) -> None:
    for name in ("one", "two"):
        queued.queue(workload(f"{name}-again", f"uid-{name}"))


@pytest.mark.parametrize("why", [too_high, in_doubt, with_two_workloads])
async def test_none_goes_of_which_a_pod_may_have_to_stay(why: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    queued = Queued()
    why(queued)
    async with looking(queued.parts, monkeypatch) as task:
        queued.needs_gpu()
        await looked(queued.parts, task)
    assert queued.patches == []


async def test_with_never_none_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    queued = Queued(NEVER)
    async with looking(queued.parts, monkeypatch) as task:
        queued.needs_gpu()
        await looked(queued.parts, task)
    assert queued.patches == []


def test_kube_scheduler_is_never_reported_to_evict_a_part_of_one() -> None:
    queued = Queued()
    queued.parts.report(urgent())
    assert queued.parts.preempt(urgent(), n1=["a", "b"]).nodes == {}


async def test_a_pod_of_none_goes_if_it_costs_less(monkeypatch: pytest.MonkeyPatch) -> None:
    queued = Queued()
    queued.parts.end("a")
    queued.parts.report(bound("a", "n1", HALF_MIB, 0, 0).annotated(**{"class": "best-effort"}))
    async with looking(queued.parts, monkeypatch) as task:
        queued.needs_gpu()
        await until(task, lambda: "a" in queued.parts.server.evictions())
        await looked(queued.parts, task)
    assert queued.patches == []


async def test_single_pods_go_first_where_both_are_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    queued = Queued()
    queued.parts.end("a")
    queued.parts.report(bound("a", "n1", FULL_MIB, 1000, 0))
    queued.parts.report(bound("beside", "n1", HALF_MIB // 2, 0, 1))
    async with looking(queued.parts, monkeypatch) as task:
        queued.needs_gpu()
        await until(task, lambda: bool(queued.patches))
    calls = [one for one in queued.parts.server.calls if "eviction" in one or "workloads" in one]
    assert [one.split("/")[-2:] for one in calls] == [["beside", "eviction"], ["workloads", "two"]]


@pytest.mark.parametrize(("job", "goes"), [("two", ["one"]), ("unread", []), ("", ["two"])])
async def test_a_pod_never_ends_its_own_workload(job: str, goes: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor one that may be its own."""
    queued = Queued()
    built = urgent().controlled_by("Job", job) if job else urgent()
    async with looking(queued.parts, monkeypatch) as task:
        queued.needs_gpu(built)
        await looked(queued.parts, task)
    assert queued.deactivated == goes


@pytest.mark.parametrize("status", [404, 409])
async def test_one_that_is_gone_or_another_by_now_is_done_with(status: int, monkeypatch: pytest.MonkeyPatch) -> None:
    queued = Queued()
    queued.refusal = ApiError(status, "", "")
    plans = queued.parts.preemption._evictor._plans
    async with looking(queued.parts, monkeypatch) as task:
        queued.needs_gpu()
        await until(task, lambda: queued.refused > 0)
        await until(task, lambda: not plans)
    assert queued.parts.preemption.evicted() == 0


async def test_one_that_the_api_server_cannot_take_now_is_deactivated_later(monkeypatch: pytest.MonkeyPatch) -> None:
    queued = Queued()
    queued.refusal = ApiError(503, "Unavailable", "")
    async with looking(queued.parts, monkeypatch) as task:
        queued.needs_gpu()
        await until(task, lambda: queued.refused > 0)
        queued.refusal = None
        await until(task, lambda: bool(queued.patches))
    assert queued.deactivated == ["two"]


@pytest.mark.parametrize("status", [403, 422])
async def test_where_the_api_server_refuses_one_for_good_another_is_deactivated(
    status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    queued = Queued()
    answer, plans = queued.answer, queued.parts.preemption._evictor._plans

    def refuses_one(method: str, path: str, body: Any) -> bytes:
        queued.refusal = ApiError(status, "", "") if path.endswith("/two") else None
        return answer(method, path, body)

    queued.parts.server.answer = refuses_one
    async with looking(queued.parts, monkeypatch) as task:
        queued.needs_gpu()
        await until(task, lambda: queued.refused > 0)
        await until(task, lambda: not plans)
        queued.needs_gpu()
        await until(task, lambda: bool(queued.patches))
    assert (queued.deactivated, queued.refused) == (["one"], 1)


async def test_one_that_is_made_anew_under_the_name_of_one_that_was_refused_is_deactivated(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    queued = Queued()
    queued.refusal = ApiError(422, "", "")
    plans = queued.parts.preemption._evictor._plans
    async with looking(queued.parts, monkeypatch) as task:
        queued.needs_gpu()
        await until(task, lambda: queued.refused > 0)
        await until(task, lambda: not plans)
        again = workload("two", "uid-two")
        again["metadata"]["uid"] = "uid-again"
        queued.queue(again)
        queued.refusal = None
        queued.needs_gpu()
        await until(task, lambda: bool(queued.patches))
    body = {"metadata": {"uid": "uid-again"}, "spec": {"active": False}}
    assert queued.patches == [(f"{PATH}/two", body)]


async def test_a_search_for_single_pods_that_has_no_end_leaves_time_for_workloads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    queued = Queued()

    class Endless(VictimSearch):
        def steps(self) -> Iterator[None]:
            while True:
                queued.parts.now_s += 0.001
                yield

    monkeypatch.setattr(planner, "VictimSearch", Endless)
    async with looking(queued.parts, monkeypatch) as task:
        queued.needs_gpu()
        await until(task, lambda: bool(queued.patches))
    assert queued.deactivated == ["two"]


async def test_the_node_with_the_lowest_bound_is_searched_first_and_those_above_the_best_are_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    queued = Queued()
    queued.parts.end("a-too")
    for row, name in enumerate(("cheap", "dear")):
        queued.queue(workload(name, f"uid-{name}"))
        queued.run(f"c{row}", name, "n2", row, priority=-1)
    searched = list[str]()

    def least(node: str, *rest: Any) -> Iterator[WorkloadEviction | None]:
        searched.append(node)
        return least_workload_eviction(node, *rest)

    monkeypatch.setattr(kueue_victims, "least_workload_eviction", least)
    async with looking(queued.parts, monkeypatch) as task:
        queued.needs_gpu(None, "n1", "n2")
        await until(task, lambda: bool(queued.patches))
    assert (searched, queued.deactivated) == (["n2"], ["cheap"])


async def test_a_plan_goes_on_with_the_second_when_only_the_first_could_be_deactivated(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    queued = Queued()
    plans = queued.parts.preemption._evictor._plans
    answer = queued.answer

    def once(method: str, path: str, body: Any) -> bytes:
        queued.refusal = ApiError(503, "Unavailable", "") if len(queued.patches) == 1 and not queued.refused else None
        return answer(method, path, body)

    queued.parts.server.answer = once
    async with looking(queued.parts, monkeypatch) as task:
        queued.needs_gpu(pod("urgent").asking(gpus=2).of_priority(1000))
        await until(task, lambda: len(queued.patches) == 2 and not plans)
    assert (queued.deactivated, queued.refused) == (["one", "two"], 1)
    reservation = queued.parts.preemption.reservations.get("uid-default-urgent")
    assert reservation is not None
    assert reservation.nominated


async def test_one_that_has_a_pod_of_a_high_priority_by_now_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    queued = Queued()
    queued.refusal = ApiError(503, "Unavailable", "")
    plans = queued.parts.preemption._evictor._plans
    async with looking(queued.parts, monkeypatch) as task:
        queued.needs_gpu()
        await until(task, lambda: queued.refused > 0)
        too_high(queued)
        queued.refusal = None
        await until(task, lambda: not plans)
    assert queued.patches == []
    assert queued.parts.preemption.reservations.get("uid-default-urgent") is None


async def test_events_give_the_reason_and_how_it_is_queued_again(monkeypatch: pytest.MonkeyPatch) -> None:
    queued = Queued()
    events = list[tuple[str, str, str]]()
    recorder = queued.parts.preemption.recorder
    monkeypatch.setattr(recorder, "event", lambda of, why, note, *_, **__: events.append((of.kind, why, note)))
    async with looking(queued.parts, monkeypatch) as task:
        queued.needs_gpu()
        await until(task, lambda: len(events) == 2)
    assert [one[:2] for one in events] == [("Workload", "Preempted"), ("Pod", "Preempting")]
    assert "spec.active to true" in events[0][2]
    assert "Workload default/two" in json.dumps(events[1])

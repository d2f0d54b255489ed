"""Evictions by the extender itself, and what nodes lack beside GPUs."""

from __future__ import annotations

from typing import Any

import pytest

from tests.builders import gpu, pod, share
from tests.unit.extender.extender_parts import FULL_MIB, ExtenderParts
from tests.unit.extender.preemption.test_evictor import bound, looked, looking


@pytest.mark.parametrize("resource", ["cpu", "memory", "ephemeral-storage", "hugepages-2Mi", "example.com/nic"])
@pytest.mark.parametrize(("taken", "evicted"), [("2", ["v"]), ("5", [])])
async def test_no_pod_is_evicted_for_a_pod_that_then_lacks_something_else(
    monkeypatch: pytest.MonkeyPatch, resource: str, taken: str, evicted: list[str]
) -> None:
    """Of 8 the victim has 2, another pod has used the rest since the scheduler's filter: 4 are requested."""
    parts = ExtenderParts(n1=1)
    parts.resources("n1", **{resource: "8"})
    victim = pod("v").asking(mib=FULL_MIB, **{resource: "2"}).on("n1")
    parts.report(victim.assigned(share(gpu(0, node="n1"), FULL_MIB)))
    parts.report(pod("other").asking(**{resource: taken}).on("n1"))
    asking = pod("urgent").asking(mib=FULL_MIB, **{resource: "4"}).of_priority(1000)
    parts.report(asking)
    assert parts.filter(asking, "n1").node_names == []
    async with looking(parts, monkeypatch) as task:
        await looked(parts, task)
    assert [name for name in parts.server.evictions() if name == "v"] == evicted


@pytest.mark.parametrize(("cpu", "evicted"), [("8", {"v0", "v1"}), ("7", {"v0"})])
async def test_what_a_pod_is_to_have_that_others_are_evicted_for_is_not_counted_for_the_next(
    monkeypatch: pytest.MonkeyPatch, cpu: str, evicted: set[str]
) -> None:
    parts = ExtenderParts(n1=2)
    parts.resources("n1", cpu=cpu)
    for row in range(2):
        parts.report(bound(f"v{row}", "n1", FULL_MIB, row=row))
    for name in ("one", "two"):
        asking = pod(name).asking(mib=FULL_MIB, cpu="4").of_priority(1000)
        parts.report(asking)
        assert parts.filter(asking, "n1").node_names == []

    def answer(_: str, path: str, __: Any) -> bytes:
        if path.endswith("/eviction") and (name := path.split("/")[-2]).startswith("v"):
            parts.end(name)
        return b"{}"

    parts.server.answer = answer
    async with looking(parts, monkeypatch) as task:
        await looked(parts, task)
    assert {name for name in parts.server.evictions() if name.startswith("v")} == evicted


@pytest.mark.parametrize(("others", "evicted"), [(1, ["v"]), (2, [])])
async def test_no_pod_is_evicted_for_a_pod_that_its_node_then_cannot_run_as_one_more(
    monkeypatch: pytest.MonkeyPatch, others: int, evicted: list[str]
) -> None:
    """The node runs two pods at most."""
    parts = ExtenderParts(n1=1)
    parts.resources("n1", pods="2")
    parts.report(pod("v").asking(mib=FULL_MIB).on("n1").assigned(share(gpu(0, node="n1"), FULL_MIB)))
    for at in range(others):
        parts.report(pod(f"other-{at}").on("n1"))
    asking = pod("urgent").asking(mib=FULL_MIB).of_priority(1000)
    parts.report(asking)
    assert parts.filter(asking, "n1").node_names == []
    async with looking(parts, monkeypatch) as task:
        await looked(parts, task)
    assert [name for name in parts.server.evictions() if name == "v"] == evicted


async def test_a_resource_that_its_node_does_not_name_keeps_no_pod_from_being_helped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """kube-scheduler has accepted the node: it has the resource from elsewhere."""
    parts = ExtenderParts(n1=1)
    parts.resources("n1", cpu="8")
    parts.report(pod("v").asking(mib=FULL_MIB).on("n1").assigned(share(gpu(0, node="n1"), FULL_MIB)))
    asking = pod("urgent").asking(mib=FULL_MIB, **{"example.com/nic": "1"}).of_priority(1000)
    parts.report(asking)
    assert parts.filter(asking, "n1").node_names == []
    async with looking(parts, monkeypatch) as task:
        await looked(parts, task)
    assert "v" in parts.server.evictions()


async def test_processors_that_were_taken_since_end_an_eviction(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = ExtenderParts(n1=1)
    parts.resources("n1", cpu="8")
    parts.report(pod("v").asking(mib=FULL_MIB, cpu="2").on("n1").assigned(share(gpu(0, node="n1"), FULL_MIB)))
    asking = pod("urgent").asking(mib=FULL_MIB, cpu="4").of_priority(1000)
    parts.report(asking)
    assert parts.filter(asking, "n1").node_names == []

    def answer(_: str, path: str, body: Any) -> bytes:
        if path.endswith("/urgent/status") and body["status"]["nominatedNodeName"]:
            parts.report(pod("other").asking(cpu="5").on("n1"))
        return b"{}"

    parts.server.answer = answer
    async with looking(parts, monkeypatch) as task:
        await looked(parts, task)
    assert "v" not in parts.server.evictions()
    assert parts.preemption.reservations.get("uid-default-urgent") is None


async def test_a_pod_that_is_also_evicted_for_cpu_is_chosen_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The best-effort pod alone frees enough of the GPU, and too little beside it."""
    parts = ExtenderParts(n1=2)
    parts.resources("n1", cpu="8")
    low = pod("low").asking(mib=FULL_MIB, cpu="2").annotated(**{"class": "best-effort"})
    parts.report(low.on("n1").assigned(share(gpu(0, node="n1"), FULL_MIB)))
    parts.report(pod("high").asking(mib=FULL_MIB, cpu="6").on("n1").assigned(share(gpu(1, node="n1"), FULL_MIB)))
    asking = pod("urgent").asking(mib=FULL_MIB, cpu="5").of_priority(1000)
    parts.report(asking)
    assert parts.filter(asking, "n1").node_names == []
    async with looking(parts, monkeypatch) as task:
        await looked(parts, task)
    assert [name for name in parts.server.evictions() if name in ("low", "high")] == ["high"]

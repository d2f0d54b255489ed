"""What the file `burst` changes in the GPU-time scheduler, its status and metrics."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from arbiter.gputime.metrics import families
from tests.unit.arbiter.conftest import wait_for
from tests.unit.arbiter.gputime_kit import A, B, Driver, GpuTimeNode, running_node
from vgpu.api.burst import BurstLimits, core_limit_percent
from vgpu.api.grant import Grant, GrantGpu
from vgpu.gputime.events import SchedulingParameters


@pytest.fixture
def node(driver: Driver) -> Iterator[GpuTimeNode]:
    yield from running_node(driver)


def limits(percent: int, *uuids: str) -> BurstLimits:
    return BurstLimits(tuple(GrantGpu(uuid, 1024, percent) for uuid in uuids))


def grant_of(core: int, *uuids: str, service_class: str = "standard") -> Grant:
    gpus = tuple(GrantGpu(uuid, 1024, core) for uuid in uuids)
    return Grant("default", "a", "uid-a", "main", gpus, service_class, 2)


def parameters(node: GpuTimeNode) -> SchedulingParameters | None:
    with node.scheduler.lock:
        return node.scheduler.containers["a"].joined


def test_the_guarantee_is_the_grants_and_the_cap_is_the_bursts_while_there_is_one(node: GpuTimeNode) -> None:
    node.container("a", core=30)
    wait_for(lambda: parameters(node) is not None)
    alone = SchedulingParameters(frozenset({A}), cap_percent=30, weight=30)
    assert parameters(node) == alone
    node.scheduler.change("a", grant_of(30, A), limits(100, A))
    assert parameters(node) == SchedulingParameters(frozenset({A}), cap_percent=100, weight=30, guaranteed_percent=30)
    node.scheduler.change("a", grant_of(30, A), limits(30, A))
    assert parameters(node) == alone, "a limit of memory only"
    node.scheduler.change("a", grant_of(30, A), limits(60, A))
    node.scheduler.change("a", grant_of(30, A))
    assert parameters(node) == alone, "the file is gone"


def test_a_container_without_a_cap_has_none_whatever_the_file_says(node: GpuTimeNode) -> None:
    node.container("a")
    wait_for(lambda: parameters(node) is not None)
    node.scheduler.change("a", grant_of(0, A), limits(60, A))
    assert parameters(node) == SchedulingParameters(frozenset({A}), weight=100)
    assert core_limit_percent(GrantGpu(A, 1024, 0), limits(60, A)) == 0
    assert core_limit_percent(GrantGpu(A, 1024, 30), limits(60, B)) == 30, "of another GPU"


def test_a_container_on_two_gpus_bursts_on_both(node: GpuTimeNode) -> None:
    one = node.container("a", core=20, gpus=(A, B))
    one.reports_channels(gpu=1)
    wait_for(lambda: (joined := parameters(node)) is not None and joined.gpus == {A, B})
    node.scheduler.change("a", grant_of(20, A, B), limits(50, A, B))
    joined = parameters(node)
    assert joined is not None
    assert (joined.cap_percent, joined.guaranteed_percent, joined.weight) == (50, 20, 20)


def test_a_process_that_yields_keeps_its_guarantee_and_burst_in_the_lowest_class(node: GpuTimeNode) -> None:
    node.container("a", core=30)
    wait_for(lambda: parameters(node) is not None)
    node.scheduler.change("a", grant_of(30, A), limits(100, A))
    with node.scheduler.lock:
        container = node.scheduler.containers["a"]
        next(iter(container.processes.values())).yields = True
        yielding = container.parameters()
    assert yielding is not None
    assert (yielding.service_class, yielding.bursts) == ("best-effort", True)


def test_status_and_metrics_tell_the_guarantee_from_the_limit(node: GpuTimeNode) -> None:
    one = node.container("a", core=30)
    wait_for(lambda: parameters(node) is not None)
    node.scheduler.change("a", grant_of(30, A), limits(100, A))
    one.works()
    wait_for(lambda: node.status("a").burst_s > 0)
    status = node.status("a")
    assert (status.requested_percent, status.limit_percent, status.suspends) == (30, 100, 0)
    assert status.burst_s < status.on_s
    reported = {
        sample.name.removeprefix("tangram_container_"): sample.value
        for family in families(node.scheduler, {"a": grant_of(30, A)})
        for sample in family.samples
    }
    assert (reported["gpu_time_guarantee_ratio"], reported["gpu_time_limit_ratio"]) == (0.3, 1.0)
    assert reported["gpu_time_credit_seconds"] == 0, "nothing stops it"
    assert reported["gpu_time_burst_seconds_total"] > 0

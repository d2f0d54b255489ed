"""The option to stop a best-effort container's copy channels, too. The driver is a double of the call that channel groups make."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.unit.arbiter.conftest import wait_for
from tests.unit.arbiter.gputime_kit import Container, Driver, GpuTimeNode, running_node
from vgpu.protocol.wire import Channels

COMPUTE, COPY = (3, 4), (9, 10, 11)


@pytest.fixture(params=[True])
def node(driver: Driver, request: pytest.FixtureRequest) -> Iterator[GpuTimeNode]:
    yield from running_node(driver, copies=request.param, watchdog_s=0)


def stopped(driver: Driver, container: Container) -> set[int]:
    with driver._lock:
        return {channel for (client, channel), count in driver._count.items() if client == container.client and count}


def stopped_for_a_request(
    node: GpuTimeNode,
    driver: Driver,
    service_class: str,
    compute: tuple[int, ...] = COMPUTE,
    copy: tuple[int, ...] = COPY,
) -> set[int]:
    """Which of its channels are stopped while a more urgent container works; afterwards all run again."""
    background, urgent = node.container("be", service_class, channels=False), node.container("lc", "latency-critical")
    background.send(Channels(0, background.client, 2, compute, copy), node.device)
    background.works()
    urgent.works()
    wait_for(lambda: driver.off(background))
    wait_for(lambda: not node.status("be").on)
    found = stopped(driver, background)
    urgent.idles()
    wait_for(lambda: not driver.off(background))
    return found


def test_a_best_effort_container_is_stopped_with_its_copies(node: GpuTimeNode, driver: Driver):
    assert stopped_for_a_request(node, driver, "best-effort") == {*COMPUTE, *COPY}


def test_a_standard_containers_copies_go_on(node: GpuTimeNode, driver: Driver):
    assert stopped_for_a_request(node, driver, "standard") == set(COMPUTE)


@pytest.mark.parametrize("node", [False], indirect=True)
def test_without_the_option_all_copies_go_on(node: GpuTimeNode, driver: Driver):
    assert stopped_for_a_request(node, driver, "best-effort") == set(COMPUTE)


def test_copies_that_do_not_fit_into_the_list_go_on(node: GpuTimeNode, driver: Driver):
    compute = tuple(range(100, 164))
    assert stopped_for_a_request(node, driver, "best-effort", compute) == set(compute)

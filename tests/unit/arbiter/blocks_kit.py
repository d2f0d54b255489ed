"""Containers with copy channels, their blocks, and a watch on the driver's calls about them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from tests.unit.arbiter.conftest import wait_for
from tests.unit.arbiter.gputime_kit import A, Container, Driver, GpuTimeNode
from vgpu.protocol.wire import Channels

COMPUTE, COPY = (3, 4), (9, 10, 11)


@dataclass
class Watch:
    """Notes each enable of a client that must not be enabled."""

    driver: Driver
    halted: set[int] = field(default_factory=set)
    enables: list[int] = field(default_factory=list)

    def __call__(self, client: int, disable: bool) -> None:
        if not disable and client in self.halted:
            self.enables.append(client)


def watching(driver: Driver) -> Iterator[Watch]:
    """A watch for a fixture. At its end no halted client was enabled."""
    made = Watch(driver)
    driver.before = made
    yield made
    assert made.enables == []


def report(
    container: Container, compute: tuple[int, ...] = COMPUTE, copy: tuple[int, ...] = COPY, *, away: bool = False
) -> None:
    container.send(Channels(0, container.client, 2, compute, copy, away=away), container.node.device)


def with_copies(node: GpuTimeNode, name: str, service_class: str = "standard", **options: int) -> Container:
    made = node.container(name, service_class, channels=False, **options)  # type: ignore[arg-type]
    report(made)
    wait_for(lambda: node.channel_groups(name) == 1 and node.scheduler.containers[name].is_on(A))
    return made


def halt(node: GpuTimeNode, name: str) -> None:
    node.scheduler.blocks.begin(name)
    wait_for(lambda: node.scheduler.blocks.status(name).halted)


def all_off(driver: Driver, container: Container) -> bool:
    return driver.channels_off(container.client) == {*COMPUTE, *COPY}

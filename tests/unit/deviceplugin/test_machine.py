"""Following a machine's GPUs through a driver that goes and comes back, and how containers get their devices when nobody said it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from deviceplugin import machine
from deviceplugin.machine import Machine, access_mode
from deviceplugin.metrics import Metrics
from deviceplugin.offer import Offer
from nvml.errors import NvmlError
from tests.unit.deviceplugin.builders import inventory
from vgpu.inventory import Inventory
from vgpu.names import DEFAULT


@pytest.mark.parametrize(
    ("wanted", "found", "environment", "mode"),
    [
        ("auto", "driver root", {}, "cdi"),
        ("auto", "loader", {}, "nvidia"),
        ("auto", "driver root", {"NVIDIA_VISIBLE_DEVICES": "void"}, "nvidia"),
        ("cdi", "loader", {"NVIDIA_VISIBLE_DEVICES": "all"}, "cdi"),
        ("nvidia", "driver root", {}, "nvidia"),
    ],
)
def test_nvidias_runtime_is_used_where_it_serves_our_own_container(
    wanted: str, found: str, environment: dict[str, str], mode: str
) -> None:
    assert access_mode(wanted, found, environment) == mode  # type: ignore[arg-type]


class Driver:
    """A driver that can be taken away: an old session of it never answers again."""

    def __init__(self) -> None:
        self.there = True
        self.generation = 0
        self.opened_generation = -1

    @contextmanager
    def opened(self, _: Path) -> Iterator[str]:
        if not self.there:
            raise NvmlError("driver not loaded")
        self.opened_generation = self.generation
        yield "driver root"

    def answers(self, uuid: str) -> str | None:
        return None if self.there and self.opened_generation == self.generation else f"card {uuid}: silent"

    def probe(self, **_: object) -> Inventory:
        return inventory(2)

    def taken_away(self) -> None:
        self.there, self.generation = False, self.generation + 1


class NoEvents:
    """A driver that never reports an XID."""

    def __init__(self, _: object) -> None:
        self.deaf: dict[str, str] = {}

    def wait(self, _: int) -> None:
        return None

    def close(self) -> None:
        return None


async def test_cards_of_a_driver_that_goes_are_ill_and_well_again_when_it_is_opened_anew(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    driver, offer = Driver(), Offer(DEFAULT, 1024)
    monkeypatch.setattr(machine, "opened", driver.opened)
    monkeypatch.setattr(machine, "probe", driver.probe)
    monkeypatch.setattr(machine, "answers", driver.answers)
    monkeypatch.setattr(machine, "Events", NoEvents)
    monkeypatch.setattr(machine, "RETRY_S", (0.001, 0.002))
    offered_before: list[bool] = []

    async def tried(_: Inventory) -> None:
        offered_before.append(offer.probed)

    follower = Machine(
        offer, Metrics(), driver_root=Path("/"), access="cdi", unit_mib=1024, health_s=0.001, probe_s=60.0,
        on_inventory=lambda _: None, try_out=tried,
    )  # fmt: skip

    async def until(*healthy: bool) -> None:
        async with asyncio.timeout(20):
            while tuple(card.healthy for card in offer.inventory().cards) != healthy:
                await offer.changed_since(offer.version)

    running = asyncio.create_task(follower.run())
    try:
        await until(True, True)
        assert offered_before == [False], "what is offered was tried"
        driver.taken_away()
        await until(False, False)
        driver.there = True
        await until(True, True)
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)

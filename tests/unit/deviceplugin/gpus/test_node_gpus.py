"""Following a machine's GPUs through a driver that ends and comes back, and how containers get their devices by default."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from deviceplugin.gpus import node_gpus as gpus
from deviceplugin.gpus.cdi_file import CdiNotWritten
from deviceplugin.gpus.node_gpus import NodeGpus, access_mode
from deviceplugin.gpus.offer import Offer
from deviceplugin.metrics import Metrics
from nvml.errors import NvmlAway, NvmlHung
from nvml.messages import (
    AnyReply,
    AnyRequest,
    CountReply,
    CountRequest,
    GpuAtRequest,
    GpuReply,
    HealthReply,
    HealthRequest,
    OpenReply,
    Xid,
    XidsReply,
    XidsRequest,
)
from nvml.queries import Nvml
from tests.unit.deviceplugin.builders import inventory
from vgpu.api.inventory import GpuCondition, Inventory
from vgpu.api.names import DEFAULT
from vgpu.health.conditions import Reading


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


class FakeNvmlConnection:
    """A driver behind a supervisor: it can be taken away, hang on one GPU, and be opened anew."""

    def __init__(self) -> None:
        self.there = True
        self.hanging: set[str] = set()
        self.hangs = 0
        self.openings = 1
        self.on_bus: frozenset[str] | None = None
        self.withheld: frozenset[str] = frozenset()
        self.silent = False
        self.closed = False
        self.reopened: list[str] = []
        self.xids: list[Xid] = []
        self.gpus = inventory(2).gpus
        self.shown: dict[str, Reading] = {}

    @property
    def nvml(self) -> Nvml:
        return Nvml(self)

    def await_open(self, _: float) -> OpenReply:
        if not self.there:
            raise NvmlAway("driver not loaded")
        return OpenReply("driver root", "")

    def reopen(self, why: str) -> None:
        self.reopened.append(why)
        self.openings += 1
        self.silent = False

    def call_all(self, requests: Sequence[AnyRequest]) -> list[AnyReply]:
        return [self._answer(request) for request in requests]

    def _answer(self, request: AnyRequest) -> AnyReply:
        if not self.there:
            raise NvmlAway("driver not loaded")
        if request.key in self.hanging:
            raise NvmlHung(f"GPU {request.key} did not return")
        match request:
            case CountRequest():
                return CountReply(len(self.gpus), "580")
            case GpuAtRequest(index):
                return GpuReply(self.gpus[index])
            case HealthRequest(uuid):
                return HealthReply(f"GPU {uuid}: silent" if self.silent else None, self.shown.get(uuid))
            case XidsRequest():
                seen, self.xids = self.xids, []
                return XidsReply(tuple(seen), {})
        raise AssertionError(request)


async def until(condition: Callable[[], object]) -> None:
    """Polls what has no event to wait for."""
    while not condition():  # noqa: ASYNC110
        await asyncio.sleep(0.001)


async def nothing(_: object) -> None:
    return None


class Following:
    """A machine that follows a driver, its grace and pauses short."""

    def __init__(
        self, driver: FakeNvmlConnection, monkeypatch: pytest.MonkeyPatch, tried: Any = nothing, **options: Any
    ) -> None:
        monkeypatch.setattr(gpus, "RETRY_S", 0.001)
        monkeypatch.setattr(gpus, "EVENTS_S", 0.001)
        monkeypatch.setattr(gpus, "GRACE_S", 0.05)
        self.offer = Offer(DEFAULT, 1024)
        self.gpus = NodeGpus(
            self.offer, Metrics(), driver, access="cdi", unit_mib=1024, health_s=0.001, probe_s=60.0,
            try_out=tried, **({"on_inventory": nothing} | options),
        )  # fmt: skip

    async def __aenter__(self) -> Following:
        self._running = asyncio.create_task(self.gpus.run())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._running.cancel()
        await asyncio.gather(self._running, return_exceptions=True)

    async def until(self, *healthy: bool) -> None:
        async with asyncio.timeout(20):
            while tuple(gpu.healthy for gpu in self.offer.inventory().gpus) != healthy:
                await self.offer.changed_since(self.offer.version)


async def test_gpus_of_a_driver_that_goes_are_ill_and_well_again_when_it_is_opened_anew(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    driver = FakeNvmlConnection()
    offered_before: list[bool] = []

    async def tried(_: Inventory) -> None:
        offered_before.append(follower.offer.probed)

    async with (follower := Following(driver, monkeypatch, tried)):
        await follower.until(True, True)
        assert offered_before[0] is False, "what is offered was tried"
        assert follower.gpus.failing == ""
        driver.there = False
        await follower.until(False, False)
        assert follower.gpus.failing == "driver not loaded", "/readyz reports it"
        driver.there = True
        await follower.until(True, True)
        assert follower.gpus.failing == ""


@pytest.mark.parametrize("offered", [False, True])
async def test_what_was_published_before_counts_also_when_it_is_known_after_the_probe(
    monkeypatch: pytest.MonkeyPatch, offered: bool
) -> None:
    driver = FakeNvmlConnection()
    first, second, third = (replace(gpu, pci=f"00000000:{at}7:00.0") for at, gpu in enumerate(inventory(3).gpus, 1))
    driver.gpus, driver.withheld = (first, second), frozenset({"0000:37:00.0"})
    driver.on_bus = frozenset({"0000:17:00.0", "0000:27:00.0", "0000:37:00.0"})
    failed = GpuCondition("SelfTestFailed", "unhealthy", 7, "the self-test failed")
    earlier = Inventory((replace(first, healthy=False, conditions=(failed,)), second, third))

    async def tried(_: Inventory) -> None:
        if not offered:
            follower.gpus.remember(earlier)

    async with (follower := Following(driver, monkeypatch, tried)):
        if offered:
            await follower.until(True, True)
            follower.gpus.remember(earlier)
        await follower.until(False, True, False)
        gpus = follower.offer.inventory().gpus
        assert ([one.uuid for one in gpus], gpus[0].conditions) == ([first.uuid, second.uuid, third.uuid], (failed,))


async def test_a_child_that_is_back_at_once_makes_no_gpu_ill(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = FakeNvmlConnection()
    async with (follower := Following(driver, monkeypatch)):
        await follower.until(True, True)
        monkeypatch.setattr(gpus, "GRACE_S", 60.0)
        version = follower.offer.version
        driver.there = False
        async with asyncio.timeout(20):
            await until(lambda: follower.gpus.failing)
            driver.there = True
            await until(lambda: not follower.gpus.failing)
        assert follower.offer.version == version


async def test_a_gpu_of_which_a_call_hangs_is_ill_with_the_reason_and_the_other_stays_well(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    driver = FakeNvmlConnection()
    uuid = driver.gpus[1].uuid
    async with (follower := Following(driver, monkeypatch)):
        await follower.until(True, True)
        driver.hanging.add(uuid)
        await follower.until(True, False)
        assert follower.gpus.failing == f"GPU {uuid} did not return"
        driver.hanging.clear()
        await follower.until(True, True)
        assert follower.gpus.failing == ""


async def test_a_gpu_that_did_not_answer_the_last_probe_is_probed_again_as_soon_as_it_is_well(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    driver = FakeNvmlConnection()
    async with (follower := Following(driver, monkeypatch)):
        await follower.until(True, True)
        driver.there = False
        await follower.until(False, False)
        driver.hanging.add(driver.gpus[1].uuid)  # while it is probed
        driver.there = True
        await follower.until(True, False)
        driver.hanging.clear()
        await follower.until(True, True)  # the next probe by time is due after 60 s


async def test_once_calls_about_two_gpus_hung_none_is_fit_for_use(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = FakeNvmlConnection()
    async with (follower := Following(driver, monkeypatch)):
        await follower.until(True, True)
        monkeypatch.setattr(gpus, "GRACE_S", 60.0)
        driver.hangs, driver.there = 2, False
        await follower.until(False, False)
        driver.hangs, driver.there = 0, True
        await follower.until(True, True)


async def test_where_no_gpu_answers_for_long_nvml_is_opened_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = FakeNvmlConnection()
    async with (follower := Following(driver, monkeypatch)):
        await follower.until(True, True)
        driver.silent = True
        await follower.until(False, False)
        await follower.until(True, True)
        assert len(driver.reopened) == 1
        assert driver.reopened[0].startswith("no GPU answers: GPU GPU-")


async def test_an_xid_makes_its_gpu_ill_until_it_has_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = FakeNvmlConnection()
    async with (follower := Following(driver, monkeypatch)):
        await follower.until(True, True)
        seen: list[dict[str, tuple[GpuCondition, ...]]] = []
        reported = follower.offer.set_conditions
        monkeypatch.setattr(
            follower.offer, "set_conditions", lambda conditions: (seen.append(dict(conditions)), reported(conditions))
        )
        driver.xids.append(Xid(driver.gpus[0].uuid, 79))
        async with asyncio.timeout(20):
            await until(lambda: len(seen) >= 2)
        (condition,) = seen[0][driver.gpus[0].uuid]
        assert (condition.reason, condition.state) == ("OffTheBus", "unhealthy")
        assert seen[1] == {}


async def test_a_stop_that_comes_while_nvml_fails_stops(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plugin that is ended closes NVML, too: both come at once."""
    running: list[asyncio.Task[None]] = []
    driver = FakeNvmlConnection()

    async def fail(_: object, __: object) -> None:
        await asyncio.sleep(0)
        driver.closed = True
        raise NvmlAway("NVML is closed")

    async def stop(_: object, __: object) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            running[0].cancel()

    monkeypatch.setattr(NodeGpus, "_watch_xids", fail)
    monkeypatch.setattr(NodeGpus, "_query_health", stop)
    follower = Following(driver, monkeypatch)
    running.append(asyncio.create_task(follower.gpus.run()))
    done, _ = await asyncio.wait(running, timeout=2)
    running[0].cancel()
    assert done


async def test_gpus_that_come_and_go_are_followed_as_soon_as_nvml_is_opened_anew(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    driver = FakeNvmlConnection()
    first, second = driver.gpus
    async with (follower := Following(driver, monkeypatch)):
        await follower.until(True, True)
        driver.gpus = (first,)
        driver.openings += 1
        await follower.until(True)  # the next probe by time is due after 60 s
        driver.gpus = ()
        driver.openings += 1
        await follower.until()
        driver.gpus = (first, second)
        driver.openings += 1
        await follower.until(True, True)


async def test_a_gpu_that_container_runtimes_cannot_be_told_of_is_not_offered_and_the_others_stay_watched(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    driver, hangs, told = FakeNvmlConnection(), asyncio.Event(), list[int]()
    monkeypatch.setattr(gpus, "DESCRIBE_RETRY_S", 0.001)
    gpu0, gpu1 = driver.gpus

    async def describe(now: Inventory) -> None:
        told.append(len(now.gpus))
        if hangs.is_set():
            raise CdiNotWritten("its disk does not answer")

    driver.gpus = (gpu0,)
    async with Following(driver, monkeypatch, on_inventory=describe) as following:
        await following.until(True)
        hangs.set()
        driver.gpus, driver.openings = (gpu0, gpu1), 2
        await until(lambda: told.count(2) > 1)
        assert [gpu.healthy for gpu in following.offer.inventory().gpus] == [True]
        driver.xids.append(Xid(gpu0.uuid, 79))
        await following.until(False)
        hangs.clear()
        await following.until(True, True)


async def test_gpus_are_not_offered_before_container_runtimes_are_told_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    driver, told = FakeNvmlConnection(), list[int]()

    async def describe(now: Inventory) -> None:
        told.append(len(now.gpus))
        if len(told) < 3:
            raise CdiNotWritten("its disk does not answer")

    async with Following(driver, monkeypatch, on_inventory=describe) as following:
        await until(lambda: told)
        assert not following.offer.probed
        await following.until(True, True)
        assert told[:3] == [2, 2, 2]


async def test_nvml_is_opened_anew_for_a_gpu_on_the_bus_that_it_does_not_list_yet(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("vgpu.health.presence.REOPEN_AFTER_S", (0.001, 0.001))
    driver = FakeNvmlConnection()
    driver.on_bus = frozenset({"0000:99:00.0"})
    async with (follower := Following(driver, monkeypatch)):
        await follower.until(True, True)
        async with asyncio.timeout(20):
            await until(lambda: len(driver.reopened) == 2)
        assert "does not list the GPU at 0000:99:00.0" in driver.reopened[0]


async def test_heat_classes_are_offered_at_most_once_a_minute_and_end_when_nvml_is_away(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    driver, at_s = FakeNvmlConnection(), [0.0]

    def clock() -> float:
        at_s[0] += 10.0  # each query is 10 s after the last one, or more
        return at_s[0]

    async with Following(driver, monkeypatch, clock=clock) as following:

        async def until(*classes: str) -> float:
            async with asyncio.timeout(20):
                while tuple(gpu.heat for gpu in following.offer.inventory().gpus) != classes:
                    await following.offer.changed_since(following.offer.version)
            return at_s[0]

        await until("normal", "normal")
        first, second = (gpu.uuid for gpu in driver.gpus)
        driver.shown = {
            first: Reading(power_mw=690_000, power_limit_mw=700_000),
            second: Reading(power_mw=90_000, power_limit_mw=700_000, headroom_c=50),
        }
        began_s = await until("hot", "cool")
        assert following.gpus.last_health(first) == HealthReply(None, driver.shown[first], heat="hot")
        driver.there = False
        assert await until("normal", "normal") - began_s >= 60.0
        gone = following.gpus.last_health(first)
        assert (gone.reading, gone.heat) == (None, "normal")
        assert gone.trouble

"""The device plugin follows who owns the node's GPUs: answers, their age, what is tried before it is offered, and what is not."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Set
from dataclasses import replace
from uuid import UUID

import pytest

from deviceplugin.gpus import owner_watch
from deviceplugin.gpus.offer import CORDONS, Offer
from deviceplugin.gpus.owner_watch import OwnerWatch
from deviceplugin.gpus.slice_watch import SlicesUnknown
from deviceplugin.pod_resources import KubeletUnreachable
from kube.objects import Pod
from tests.builders import cordoned, pod
from vgpu.api.grant import AssignedGpu
from vgpu.api.inventory import Gpu, GpuCondition, Inventory
from vgpu.api.names import DEFAULT
from vgpu.health.foreign import DRA_DRIVER, ForeignDevice
from vgpu.health.owners import LAST_ANSWER_S, RETURN_S, Owners
from vgpu.health.selection import selection_from_list

ONE, TWO = (Gpu(f"GPU-{UUID(int=at)}", at, "t4", 2048) for at in range(2))
BOTH = Inventory((ONE, TWO))


class Kubelet:
    """Its records, as `PodResources` answers."""

    def __init__(self) -> None:
        self.foreign: set[ForeignDevice] = set()
        self.away = False
        self.finished: Set[tuple[str, str]] = frozenset()

    async def others(self, domain: str, finished: Set[tuple[str, str]]) -> frozenset[ForeignDevice]:
        assert domain == DEFAULT.domain
        self.finished = finished
        if self.away:
            raise KubeletUnreachable("no answer")
        return frozenset(self.foreign)


class Slices:
    """Of the node, as `SliceWatch` answers."""

    def __init__(self) -> None:
        self.found: tuple[ForeignDevice, ...] = ()
        self.silent = 0.0
        self.away = False

    async def first(self) -> None:
        return

    def silent_s(self) -> float:
        return self.silent

    def devices(self) -> tuple[ForeignDevice, ...]:
        if self.away:
            raise SlicesUnknown("no answer")
        return self.found


class Pods:
    """None, or those named."""

    def __init__(self) -> None:
        self.shown: list[Pod] = []

    def pods(self) -> dict[int, Pod]:
        return dict(enumerate(self.shown))


class Watched:
    """A node with two GPUs, at time `at_s`."""

    def __init__(self, *selectors: str) -> None:
        self.kubelet, self.slices, self.pods, self.offer = Kubelet(), Slices(), Pods(), Offer(DEFAULT, 1024)
        self.at_s, self.labels = 0.0, dict[str, str]()
        self.may_end, self.begun = asyncio.Event(), asyncio.Event()
        self.may_end.set()
        self.full = False
        """Is the disk, so that no verdict of a trial can be written?"""
        self.tried: list[list[int]] = []
        """Indexes of the GPUs of each trial, and in `offered_then` of those that were offered meanwhile."""
        self.offered_then: list[list[int]] = []
        self.watch = OwnerWatch(
            Owners(selection_from_list(selectors or ("all",))), self.offer, self.kubelet, self.slices, self.pods,  # type: ignore[arg-type]
            labels=lambda: self.labels, try_out=self._try_out, until_idle=self._nothing,
            clock=lambda: self.at_s, now=lambda: 1_000_000 + self.at_s,
        )  # fmt: skip

    async def _nothing(self) -> None:
        return

    async def _try_out(self, inventory: Inventory) -> None:
        self.tried.append([gpu.index for gpu in inventory.gpus])
        self.offered_then.append([gpu.index for gpu in self.offer.inventory().gpus if gpu.offered])
        self.begun.set()
        await self.may_end.wait()
        if self.full:
            raise OSError(errno.ENOSPC, "No space left on device")

    async def start(self, inventory: Inventory = BOTH) -> list[list[str]]:
        """As `NodeGpus` does with each probe."""
        await self.watch.before_offer(inventory)
        self.offer.set_inventory(inventory)
        return self.reasons()

    async def after(self, seconds: float) -> list[list[str]]:
        self.at_s += seconds
        await self.watch.once()
        return self.reasons()

    def reasons(self) -> list[list[str]]:
        return [[one.reason for one in gpu.withdrawn] for gpu in self.offer.inventory().gpus]


async def test_a_gpu_that_comes_back_is_tried_with_those_that_are_offered_unless_it_is_anothers() -> None:
    made = Watched()
    testing = GpuCondition("SelfTest", "withdrawn", 7)
    made.offer.set_withdrawn(CORDONS, {gpu.uuid: testing for gpu in BOTH.gpus})
    await made.start()
    made.tried.clear()
    await made.watch.before_back(BOTH.gpus[1].uuid)
    assert made.tried == [[1]]
    made.offer.set_withdrawn(CORDONS, {BOTH.gpus[1].uuid: testing})
    await made.watch.before_back(BOTH.gpus[1].uuid)
    assert made.tried[1:] == [[0, 1]]
    assert made.offered_then[-1] == [0]


async def test_a_gpu_of_another_is_not_offered_from_the_first_on_and_never_tried() -> None:
    made = Watched()
    made.kubelet.foreign = {ForeignDevice("nvidia.com/gpu", ONE.uuid)}
    assert await made.start() == [["GpuClash"], []]
    assert made.tried == [[1]]
    made.slices.found = (ForeignDevice(DRA_DRIVER, TWO.uuid),)
    assert await made.after(5) == [["GpuClash"], ["GpuClash"]]
    assert made.offer.inventory().gpus[1].withdrawn[0].since_s == 1_000_005


async def test_of_a_gpu_that_was_away_others_are_asked_anew_before_it_is_offered() -> None:
    made = Watched()
    await made.start()
    await made.start(replace(BOTH, gpus=(TWO,)))
    made.kubelet.foreign = {ForeignDevice("nvidia.com/gpu", ONE.uuid)}  # since the last check
    assert await made.start() == [["GpuClash"], []]


async def test_a_gpu_that_comes_back_is_tried_before_it_is_offered() -> None:
    made = Watched()
    await made.start()
    made.kubelet.foreign = {ForeignDevice("nvidia.com/gpu", "0::1")}
    assert await made.after(5) == [["GpuClash"], []]
    made.kubelet.foreign = set()
    made.tried.clear()
    assert await made.after(RETURN_S - 1) == [["GpuClash"], []]
    assert not made.tried
    assert await made.after(1) == [[], []]
    assert (made.tried, made.offered_then[-1]) == ([[0, 1]], [1])


async def test_a_cordoned_gpu_is_not_tried_and_stays_cordoned_beside_a_clash() -> None:
    made = Watched()
    made.offer.set_withdrawn(CORDONS, {ONE.uuid: cordoned(ONE, "cordoned").withdrawn[0]})
    assert await made.start() == [["Cordoned"], []]
    assert made.tried == [[1]]
    made.kubelet.foreign = {ForeignDevice("nvidia.com/gpu", ONE.uuid)}
    assert await made.after(5) == [["Cordoned", "GpuClash"], []]


async def test_a_kubelet_that_is_away_at_the_start_withdraws_all_and_later_counts_as_it_answered_last() -> None:
    made = Watched()
    made.kubelet.away = True
    assert await made.start() == [["OwnerUnknown"], ["OwnerUnknown"]]
    assert "did not answer yet" in made.watch.unknown
    assert list(made.watch.failing.values()) == ["no answer"]
    made.kubelet.away = False
    assert await made.after(5) == [[], []]
    assert (made.watch.unknown, made.watch.failing) == ("", {})
    made.kubelet.away = True
    assert await made.after(LAST_ANSWER_S) == [[], []]
    assert await made.after(1) == [["OwnerUnknown"], ["OwnerUnknown"]]


async def test_a_silent_watch_of_slices_counts_for_no_longer_than_the_kubelet() -> None:
    made = Watched()
    await made.start()
    made.at_s, made.slices.silent = 149, 149
    assert await made.after(0) == [[], []]
    made.slices.away = True
    assert await made.after(LAST_ANSWER_S - 149) == [[], []]
    assert await made.after(1) == [["OwnerUnknown"], ["OwnerUnknown"]]


async def test_a_gpu_that_is_put_in_is_not_offered_before_both_were_asked() -> None:
    made = Watched()
    await made.start(replace(BOTH, gpus=(ONE,)))
    made.kubelet.foreign = {ForeignDevice("nvidia.com/gpu", TWO.uuid)}
    assert await made.start() == [[], ["GpuClash"]]


async def test_a_check_that_waits_while_a_gpu_is_put_in_does_not_offer_it(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Watched()
    await made.start(replace(BOTH, gpus=(ONE,)))
    made.kubelet.foreign = {ForeignDevice("nvidia.com/gpu", TWO.uuid)}
    made.may_end.clear()
    made.begun.clear()
    put_in = asyncio.create_task(made.start())
    await made.begun.wait()
    asked, check = asyncio.Event(), made.watch.check

    async def checked() -> None:
        await check()
        asked.set()

    monkeypatch.setattr(made.watch, "check", checked)
    once = asyncio.create_task(made.watch.once())
    await asked.wait()
    made.may_end.set()
    await asyncio.gather(put_in, once)
    assert made.reasons() == [[], ["GpuClash"]]


async def test_a_full_disk_keeps_a_gpu_that_comes_back_withdrawn_until_it_can_be_tried(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(owner_watch, "CHECK_S", 0.0)
    made = Watched()
    made.kubelet.foreign = {ForeignDevice("nvidia.com/gpu", ONE.uuid)}
    await made.start()
    made.kubelet.foreign = set()
    made.at_s += RETURN_S
    made.begun.clear()
    made.full = True
    running = asyncio.create_task(made.watch.run())
    try:
        async with asyncio.timeout(60):
            for full in (True, True, False):
                made.full = full
                await made.begun.wait()
                made.begun.clear()
                if full:
                    assert made.reasons() == [["GpuClash"], []]
            while made.reasons() != [[], []]:
                await made.offer.changed_since(made.offer.version)
            assert not running.done()
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


async def test_labels_select_and_pods_that_have_ended_are_left_out_of_the_kubelets_list() -> None:
    made = Watched("label=pool=ours")
    part = AssignedGpu(ONE.uuid, 0, 1024)
    for name, phase in (("ended", "Succeeded"), ("runs", "Running")):
        made.pods.shown.append(pod(name).asking(mib=1024).on("n1").assigned(part).with_phase(phase).build())
    assert await made.start() == [["NotSelected"], ["NotSelected"]]
    assert made.kubelet.finished == {("default", "ended")}
    made.labels = {"pool": "ours"}
    assert await made.after(5) == [[], []]

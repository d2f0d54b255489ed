"""A GPU that is to be tried is known to the next plugin, whenever this one is killed: each change of the disk and of the node's annotation may be its last."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from deviceplugin.gpus.cordon_watch import CordonWatch
from deviceplugin.gpus.earlier import EarlierInventory
from deviceplugin.gpus.offer import Offer
from deviceplugin.gpus.publish import Publisher
from deviceplugin.gpus.untested import UntestedGpus
from deviceplugin.pods.node_pods import NodePods
from kube.client import Client
from kube.objects import Node
from tests.builders import gpu
from tests.integration.deviceplugin.harness import NODE, PodApi
from tests.unit.deviceplugin.simulated_plugin import Killed, cut_after
from vgpu.api.inventory import WITHDRAWN, GpuCondition, Inventory, Withdrawal
from vgpu.api.names import DEFAULT
from vgpu.gputime.trial_verdict import TrialOutcome, TrialVerdict
from vgpu.health.cordons import Opened

ONE, TWO = gpu(0), gpu(1)
BOTH, WITHOUT = Inventory((ONE, TWO)), Inventory((TWO,))
ILL = (GpuCondition("OffTheBus", "unhealthy", 1, "XID 79"),)
CLASH = {ONE.uuid: GpuCondition(Withdrawal.CLASH, WITHDRAWN, 1, "nvidia.com/gpu")}
MOST_CHANGES = 60
"""Of a plugin in this test: more than it makes."""


class Plugin:
    """What of a plugin concerns self-tests. No test ever ends."""

    def __init__(self, folder: Path, client: Client) -> None:
        self.offer, self.pods = Offer(DEFAULT, 1024), NodePods(DEFAULT, 1024)
        self.pods.attach(self._never, lambda: True)
        self.cordons = CordonWatch(
            self.offer, self.pods, tuple, folder / "nvml.withheld", lambda _: Opened(), self._try_out, lambda *_: None,
            untested=UntestedGpus(folder / "gpus.untested"),
        )  # fmt: skip
        self.cordons.load()
        self.offer.hold_back = self.cordons.hold_back
        earlier = EarlierInventory(DEFAULT.inventory, self.cordons.remember)
        self.publisher = Publisher(client, NODE, self.offer, seen=self._seen)
        self.publisher.before_write, self.publisher.shown = self.cordons.before_published, self.cordons.published
        self._earlier = earlier

    def _seen(self, node: Node) -> None:
        self.cordons.node_seen(None)
        self._earlier.seen(node)

    async def _never(self) -> None:
        await asyncio.Event().wait()

    async def _try_out(self, _: str) -> TrialVerdict:
        await self._never()
        return TrialVerdict(TrialOutcome.WORKS)

    async def round(self, *, cordons_first: bool) -> None:
        parts: list[Callable[[], Awaitable[Any]]] = [self.cordons.once, self.publisher.publish]
        for part in parts if cordons_first else reversed(parts):
            await part()

    def end(self) -> None:
        for test in self.cordons._tests.values():
            test.cancel()

    def tries(self) -> bool:
        (one,) = [one for one in self.offer.inventory().gpus if one.uuid == ONE.uuid]
        return one.cordon == "testing"


def killing(publisher: Publisher, after: int) -> None:
    """The plugin ends before its patch of that number of the annotation, or after it."""
    before, write, count = publisher.before_write, publisher.shown, iter(range(MOST_CHANGES))

    async def killed_before(inventory: Inventory) -> None:
        await before(inventory)
        if next(count) == after:
            raise Killed

    def killed_after(inventory: Inventory) -> None:
        if next(count) == after:
            raise Killed
        write(inventory)

    publisher.before_write, publisher.shown = killed_before, killed_after


async def live(plugin: Plugin, *, cordons_first: bool, clash: bool) -> None:
    """The GPU leaves, is away for a while, and is back."""
    for inventory in (WITHOUT, WITHOUT, BOTH, BOTH):
        if clash and inventory is BOTH:
            plugin.offer.set_withdrawn("owners", CLASH)
        plugin.offer.set_inventory(inventory, {})
        await plugin.round(cordons_first=cordons_first)


@pytest.mark.parametrize("clash", [False, True], ids=["ours", "another plugin offers it when it is back"])
@pytest.mark.parametrize("cordons_first", [False, True])
@pytest.mark.parametrize("by", ["disk", "annotation"])
async def test_a_plugin_that_is_killed_at_any_step_leaves_the_self_test_to_the_next(
    tmp_path: Path, *, by: str, cordons_first: bool, clash: bool
) -> None:
    survived = False
    for after in range(MOST_CHANGES):
        folder = tmp_path / str(after)
        async with PodApi() as api, api.client() as client:
            plugin = Plugin(folder, client)
            plugin.offer.set_inventory(BOTH, {ONE.uuid: ILL})
            await plugin.round(cordons_first=True)
            if by == "annotation":
                killing(plugin.publisher, after)
            survived = True
            with cut_after(after if by == "disk" else None):
                try:
                    await live(plugin, cordons_first=cordons_first, clash=clash)
                except Killed:
                    survived = False
            plugin.end()
            again = Plugin(folder, client)
            again.offer.set_inventory(WITHOUT)
            await again.round(cordons_first=cordons_first)
            again.offer.set_inventory(BOTH)
            assert again.tries(), after
            again.end()
        if survived:
            return
    raise AssertionError(f"more than {MOST_CHANGES} changes")


async def test_an_inventory_without_the_gpu_is_not_published_while_the_disk_does_not_answer(tmp_path: Path) -> None:
    async with PodApi() as api, api.client() as client:
        plugin = Plugin(tmp_path, client)
        plugin.offer.set_inventory(BOTH, {ONE.uuid: ILL})
        await plugin.round(cordons_first=True)
        published = api.inventory
        plugin.offer.set_inventory(WITHOUT, {})
        (tmp_path / "gpus.untested").mkdir()
        with pytest.raises(OSError, match="gpus"):
            await plugin.publisher.publish()
        assert api.inventory == published
        (tmp_path / "gpus.untested").rmdir()
        assert await plugin.publisher.publish()
        assert api.inventory != published
        plugin.end()

"""A declared layout is checked where something may have changed, and rarely elsewhere: no change is lost by that."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from deviceplugin.mig.declared import CHECK_S
from deviceplugin.mig.declared_pace import DONE_S, SOON_S, WAITING_S, Pace
from tests.unit.deviceplugin.mig.declared_node import FILE, HALF, LABEL, SMALL, Node
from vgpu.api.inventory import WITHDRAWN, GpuCondition, Withdrawal
from vgpu.api.mig import MigSlot

QUIET_ROUNDS = 90
CHANGE_ROUNDS = 12
"""To settle, change the GPU and see it. SETTLE_S and a few rounds."""


async def node_at_rest(folder: Path) -> Node:
    node = Node(folder)
    node.labels = {LABEL: "mixed"}
    await node.paced(round((SOON_S + DONE_S) / CHECK_S) + CHANGE_ROUNDS)
    assert (node.plugin.state, node.withdrawn) == ("success", {})
    await after_a_check(node)
    node.driver.reads.clear()
    node.lists = 0
    return node


async def after_a_check(node: Node) -> None:
    """So that the next one by time is far."""
    before = node.lists
    while node.lists == before:
        await node.paced(1)


async def test_while_nothing_changes_only_what_is_cheap_is_read(tmp_path: Path) -> None:
    node = await node_at_rest(tmp_path)
    await node.paced(QUIET_ROUNDS)
    checks = round(QUIET_ROUNDS * CHECK_S / DONE_S)
    assert node.driver.reads == {True: QUIET_ROUNDS, False: checks}
    assert node.lists == checks


async def test_a_layout_that_waits_for_a_pod_is_checked_at_once_when_the_pod_goes(tmp_path: Path) -> None:
    node = Node(tmp_path)
    used = node.driver.add(MigSlot(0, "7g.80gb"))
    node.pods.have(used.uuids)
    node.done = node.pods.given
    node.labels = {LABEL: "mixed"}
    await node.paced(round(SOON_S / CHECK_S) + 1)
    assert node.withdrawn
    await after_a_check(node)
    node.lists = 0
    await node.paced(QUIET_ROUNDS)
    assert node.lists == round(QUIET_ROUNDS * CHECK_S / WAITING_S)
    await after_a_check(node)
    node.pods.have(())
    node.done = node.pods.given
    await node.paced(4)  # less than the wait for the next check by time
    assert (node.profiles(), node.plugin.state) == (["1g.10gb", "3g.40gb"], "success")


def other_label(node: Node) -> None:
    node.labels = {LABEL: "halves"}


def no_label(node: Node) -> None:
    node.labels = {}


def other_file(node: Node) -> None:
    fresh = node.file.with_suffix(".new")
    fresh.write_text(FILE.replace('{"1g.10gb": 1, "3g.40gb": 1}', '{"3g.40gb": 2}'))
    fresh.replace(node.file)


def no_file(node: Node) -> None:
    node.file.unlink()


def instance_removed(node: Node) -> None:
    number = next(number for number, one in node.driver.instances.items() if one.profile == "1g.10gb")
    del node.driver.instances[number]


def instance_added(node: Node) -> None:
    node.driver.add(MigSlot(4, "1g.10gb") if node.driver.at(SMALL) else SMALL)


def instances_replaced(node: Node) -> None:
    """By as many of the same profiles, elsewhere, after a reset of the GPU by somebody else."""
    node.driver.instances.clear()
    node.driver.add(MigSlot(0, "1g.10gb"))
    node.driver.add(HALF)


def mode_off(node: Node) -> None:
    node.driver.reset()
    node.driver.on = False


def withdrawn_by_another(node: Node) -> None:
    node.offer.set_withdrawn("other", {node.gpu.uuid: GpuCondition(Withdrawal.CLASH, WITHDRAWN, 1)})


CHANGES: list[Callable[[Node], None]] = [
    other_label, no_label, other_file, no_file, instance_removed, instance_added, instances_replaced, mode_off, withdrawn_by_another,
]  # fmt: skip


@pytest.mark.parametrize("change", CHANGES, ids=lambda one: one.__name__)
async def test_a_change_is_followed_as_by_a_plugin_that_checks_in_each_round(
    tmp_path: Path, change: Callable[[Node], None]
) -> None:
    found = []
    for each_round in (False, True):
        node = await node_at_rest(tmp_path)
        if each_round:
            node.plugin._pace.due = lambda _: True  # type: ignore[method-assign]
        change(node)
        await node.paced(CHANGE_ROUNDS)
        found.append((node.plugin.state, node.driver.layout(), node.driver.on, dict(node.withdrawn), node.events))
    assert found[0] == found[1]


async def test_any_changes_in_a_row_end_as_for_a_plugin_that_checks_in_each_round(tmp_path: Path) -> None:
    for seed in range(6):
        found = []
        for each_round in (False, True):
            rng, node = random.Random(seed), Node(tmp_path)
            node.labels = {LABEL: "mixed"}
            if each_round:
                node.plugin._pace.due = lambda _: True  # type: ignore[method-assign]
            for _ in range(4):
                await node.paced(rng.randrange(40))
                rng.choice([other_label, other_file, instance_removed_if_any, instances_replaced, mode_on])(node)
            await node.paced(round(DONE_S / CHECK_S) + CHANGE_ROUNDS)
            found.append((node.plugin.state, node.profiles(), node.driver.on, dict(node.withdrawn)))
        assert found[0] == found[1], seed


def instance_removed_if_any(node: Node) -> None:
    if node.driver.instances:
        node.driver.instances.popitem()


def mode_on(node: Node) -> None:
    node.driver.on = True


def test_half_made_instances_and_processes_are_seen_now_and_then() -> None:
    now_s = 0.0
    pace, checks = Pace(lambda: now_s), list[float]()
    for at in range(100):
        now_s = float(at)
        if pace.due("same"):
            checks.append(now_s)
            pace.checked(WAITING_S)
    assert checks == [*map(float, range(10)), *(19.0 + 10 * i for i in range(9))]

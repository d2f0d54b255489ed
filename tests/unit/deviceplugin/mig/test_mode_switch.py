"""MIG mode is switched on a GPU that was idle for long, after our own handles are closed, and not otherwise."""

from __future__ import annotations

from pathlib import Path

import pytest

from deviceplugin.mig.mode_switch import CLOSE_S
from tests.unit.deviceplugin.mig.declared_node import HALF, LABEL, OTHER_HALF, SMALL, Node, mode_node, until_idle
from tests.unit.deviceplugin.mig.double import Killed
from vgpu.api.mig_device import slot_device
from vgpu.mig.declared import NVIDIA, NVIDIA_STATE


async def test_mig_mode_is_switched_on_a_gpu_that_was_idle_for_long_after_our_handles_are_closed(
    tmp_path: Path,
) -> None:
    node = mode_node(tmp_path)
    await until_idle(node)
    await node.plugin.once()
    assert node.withdrawn
    node.open = True
    await node.rounds()
    assert node.switch.withheld == {node.gpu.uuid}
    assert not node.driver.on
    node.open = False
    await node.rounds()
    assert node.driver.layout() == (OTHER_HALF, HALF)
    assert (node.switch.withheld, node.withdrawn, node.plugin.state) == (frozenset(), {}, "success")


@pytest.mark.parametrize("device", ["", "-0001", "::2"])
async def test_the_mode_of_a_gpu_that_a_pod_has_stays_and_its_idle_time_begins_anew(
    tmp_path: Path, device: str
) -> None:
    node = mode_node(tmp_path)
    await until_idle(node)
    node.use(node.gpu.uuid + device)
    await node.plugin.once()
    assert not node.withdrawn
    node.listed = []
    await until_idle(node)
    assert not node.driver.on
    await node.rounds()
    assert node.driver.on


async def test_pods_whose_slots_need_the_mode_do_not_keep_it_off(tmp_path: Path) -> None:
    """After a reboot in which the mode was lost they cannot start before it is on again."""
    node = mode_node(tmp_path)
    node.use(slot_device(node.gpu.uuid, SMALL))
    await until_idle(node)
    await node.rounds()
    assert node.driver.on


async def test_a_mode_that_needs_a_reset_and_a_gpu_that_is_not_closed_are_reported_and_the_gpu_is_offered(
    tmp_path: Path,
) -> None:
    node = mode_node(tmp_path)
    node.driver.resets = True
    await until_idle(node)
    await node.rounds(3)
    assert node.plugin.state == "failed" or await node.rounds() is None
    assert "reset" in node.events[-1][1]
    assert (node.switch.withheld, node.withdrawn) == (frozenset(), {})
    node = mode_node(tmp_path)
    node.open = True
    await until_idle(node)
    await node.rounds(3)
    node.now_s += CLOSE_S
    await node.rounds(2)
    assert "did not close" in node.events[-1][1]
    assert (node.switch.withheld, node.withdrawn) == (frozenset(), {})


async def test_a_label_that_goes_opens_the_gpu_again(tmp_path: Path) -> None:
    node = mode_node(tmp_path)
    node.open = True
    await until_idle(node)
    await node.rounds(2)
    assert node.switch.withheld
    node.labels = {}
    await node.rounds(1)
    assert (node.switch.withheld, node.withdrawn, node.plugin.state) == (frozenset(), {}, None)


@pytest.mark.parametrize("labels", [{LABEL: "on-demand"}, {NVIDIA: "halves", NVIDIA_STATE: "pending"}])
async def test_a_label_that_changes_while_the_gpu_is_closed_opens_it_again(
    tmp_path: Path, labels: dict[str, str]
) -> None:
    node = mode_node(tmp_path)
    node.open = True
    await until_idle(node)
    await node.rounds(2)
    assert node.switch.withheld
    node.labels = labels
    await node.plugin.once()
    assert (node.switch.withheld, node.withdrawn) == (frozenset(), {})
    assert not node.driver.on


IDLE_ROUNDS = 24
"""Rounds until a GPU was idle for long, is closed and switched, and is offered again."""


def layout_to_be(node: Node, *, on: bool) -> None:
    """A GPU that is to get the other MIG mode, with instances that its new mode has or that its old one had."""
    node.labels = {LABEL: "halves" if on else "off"}
    node.driver.on = not on
    for slot in () if on else (HALF, OTHER_HALF):
        node.driver.add(slot)
    node.probe()


@pytest.mark.parametrize("on", [True, False])
async def test_a_plugin_that_is_killed_at_any_step_of_a_switch_is_followed_by_one_that_ends_it(
    tmp_path: Path, *, on: bool
) -> None:
    cut_at, finished = 0, False
    while not finished:
        node = Node(tmp_path, mode_idle_s=60.0)
        layout_to_be(node, on=on)
        node.start(cut_at)
        try:
            await node.rounds(IDLE_ROUNDS)
            finished = True
        except Killed:
            pass
        node.start()
        await node.rounds(IDLE_ROUNDS)
        assert (node.driver.on, node.driver.layout()) == (on, (OTHER_HALF, HALF) if on else ()), cut_at
        assert (node.switch.withheld, node.withdrawn, node.plugin.state) == (frozenset(), {}, "success"), cut_at
        cut_at += 1
    assert cut_at > 6


async def test_a_plugin_that_is_killed_between_two_rounds_of_a_switch_is_followed_by_one_that_ends_it(
    tmp_path: Path,
) -> None:
    for rounds in range(14, IDLE_ROUNDS):
        node = Node(tmp_path, mode_idle_s=60.0)
        layout_to_be(node, on=True)
        await node.rounds(rounds)
        node.start()
        await node.rounds(IDLE_ROUNDS)
        assert (node.driver.layout(), node.plugin.state) == ((OTHER_HALF, HALF), "success"), rounds


async def test_a_successor_that_the_driver_refuses_leaves_the_gpu_out_with_the_reason(tmp_path: Path) -> None:
    """Its mode is on, as the plugin before it had it, and no instance can be made."""
    node = Node(tmp_path, mode_idle_s=60.0)
    layout_to_be(node, on=True)
    node.start(2)
    with pytest.raises(Killed):
        await node.rounds(IDLE_ROUNDS)
    assert node.driver.on
    node.driver.refuses = "Unknown Error"
    node.start()
    await node.rounds(3)
    assert node.plugin.state == "failed"
    assert "Unknown Error" in node.events[-1][1]
    assert not any(map(node.offer.devices, node.offer.resources())), (
        "a GPU in MIG mode without instances has nothing to offer"
    )

"""A node follows its declared MIG configuration: nothing in use is touched, a refused one changes nothing, and a killed plugin's successor goes on."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from deviceplugin.mig.declared import RETRY_S
from deviceplugin.mig.device_users import UsersUnknown
from tests.unit.deviceplugin.mig.declared_node import FILE, HALF, LABEL, OTHER_HALF, SMALL, Node
from tests.unit.deviceplugin.mig.double import Killed
from vgpu.api.inventory import WITHDRAWN, GpuCondition, Withdrawal
from vgpu.api.mig import MigSlot
from vgpu.api.names import DEFAULT
from vgpu.mig.declared import NVIDIA, NVIDIA_STATE


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path)


async def test_without_a_label_nothing_is_touched(node: Node) -> None:
    node.driver.add(SMALL)
    for labels in ({}, None, {NVIDIA_STATE: "success"}):
        node.labels = labels
        await node.rounds()
    assert node.driver.layout() == (SMALL,)
    assert (node.plugin.state, node.events, node.withdrawn) == (None, [], {})


@pytest.mark.parametrize("label", [LABEL, NVIDIA])
async def test_the_layout_becomes_that_of_the_label_and_the_gpu_is_withdrawn_meanwhile(node: Node, label: str) -> None:
    node.driver.add(SMALL)
    node.labels = {label: "halves"}
    await node.plugin.once()
    assert node.withdrawn[node.gpu.uuid].reason == Withdrawal.MIG_CONFIG
    assert node.driver.layout() == (SMALL,), "the scheduler must see the withdrawal first"
    await node.rounds()
    assert node.driver.layout() == (OTHER_HALF, HALF)
    assert not node.withdrawn
    assert node.plugin.label == {DEFAULT.mig_config_state: "success"}
    assert [state for state, _ in node.events] == ["pending", "success"]
    assert f"{label}=halves" in node.events[-1][1]


async def test_a_gpu_stays_withdrawn_until_a_probe_shows_its_new_instances(node: Node) -> None:
    node.labels = {LABEL: "halves"}
    node.plugin._probe = lambda: None
    await node.rounds()
    assert node.driver.layout() == (OTHER_HALF, HALF)
    assert node.withdrawn
    assert node.plugin.state == "pending"
    node.probe()
    await node.rounds(1)
    assert not node.withdrawn
    assert node.plugin.state == "success"


async def test_an_instance_in_use_stays_and_its_gpu_gets_no_new_pods_until_it_is_free(node: Node) -> None:
    used = node.driver.add(SMALL)
    node.use(used.uuids[0])
    node.probe()
    node.labels = {LABEL: "halves"}
    await node.rounds(5)
    assert node.driver.layout() == (SMALL,)
    assert node.withdrawn
    assert node.plugin.state == "pending"
    assert "pod default/p" in node.events[0][1]
    node.listed = []
    await node.rounds()
    assert node.driver.layout() == (OTHER_HALF, HALF)
    assert node.driver.destroyed == [SMALL]


async def test_a_process_of_no_pod_keeps_its_instance(node: Node) -> None:
    used = node.driver.add(SMALL)
    node.driver.processes[used.uuids[0]] = {4711}
    node.labels = {LABEL: "halves"}
    await node.rounds()
    assert node.driver.layout() == (SMALL,)
    assert "process 4711" in node.events[0][1]


async def test_instances_are_made_beside_one_in_use_where_the_configuration_has_it(node: Node) -> None:
    node.use(node.driver.add(SMALL).uuids[0])
    node.labels = {LABEL: "mixed"}
    await node.rounds()
    assert node.profiles() == ["1g.10gb", "3g.40gb"]
    assert not node.driver.destroyed


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("unknown", ["'unknown'", "halves, mixed"]),
        ("not-here", ["1g.5gb", "it has"]),
        ("no-such-gpu", ["GPU 5", "this node has 0"]),
    ],
)
async def test_a_configuration_that_cannot_be_had_changes_nothing_and_is_named(
    node: Node, name: str, words: list[str]
) -> None:
    node.driver.add(SMALL)
    node.labels = {LABEL: name}
    await node.rounds(5)
    assert node.driver.layout() == (SMALL,)
    assert not node.withdrawn
    assert node.plugin.state == "failed"
    ((state, why),) = node.events
    assert state == "failed"
    assert all(one in why for one in [f"{LABEL}={name}", "nothing was changed", *words]), why


@pytest.mark.parametrize(
    "text", [None, "version: v1\nmig-configs: [", b"\xff\xfe", "version: v1\nmig-configs: {halves: [{devices: all}]}"]
)
async def test_a_file_that_cannot_be_read_changes_nothing(node: Node, text: str | bytes | None) -> None:
    node.driver.add(SMALL)
    node.labels = {LABEL: "halves"}
    node.file.unlink()
    if text is not None:
        node.file.write_bytes(text if isinstance(text, bytes) else text.encode())
    await node.rounds()
    assert node.driver.layout() == (SMALL,)
    assert node.plugin.state == "failed"
    assert str(node.file) in node.events[0][1]
    node.file.write_text(FILE)
    await node.rounds()
    assert node.driver.layout() == (OTHER_HALF, HALF)


async def test_labels_that_contradict_change_nothing(node: Node) -> None:
    node.labels = {LABEL: "halves", NVIDIA: "mixed"}
    await node.rounds()
    assert (node.driver.layout(), node.plugin.state, node.withdrawn) == ((), "failed", {})
    del node.labels[NVIDIA]
    await node.rounds()
    assert node.driver.layout() == (OTHER_HALF, HALF)


@pytest.mark.parametrize("work", ["pending", "rebooting"])
async def test_nothing_is_touched_while_nvidias_manager_is_at_work(node: Node, work: str) -> None:
    node.driver.add(SMALL)
    node.labels = {NVIDIA: "halves", NVIDIA_STATE: work}
    await node.rounds()
    assert (node.driver.layout(), node.plugin.state, node.withdrawn) == ((SMALL,), "pending", {})
    node.labels[NVIDIA_STATE] = "success"
    await node.rounds()
    assert node.driver.layout() == (OTHER_HALF, HALF)


async def test_a_gpu_that_is_withdrawn_for_another_reason_waits(node: Node) -> None:
    node.labels = {LABEL: "halves"}
    node.offer.set_withdrawn("cordons", {node.gpu.uuid: GpuCondition(Withdrawal.CORDONED, WITHDRAWN, 0, "fan")})
    await node.rounds()
    assert (node.driver.layout(), node.withdrawn) == ((), {})
    assert "fan" in node.events[0][1]
    node.offer.set_withdrawn("cordons", {})
    await node.rounds()
    assert node.driver.layout() == (OTHER_HALF, HALF)


async def test_where_it_is_not_known_what_pods_have_nothing_is_touched(node: Node) -> None:
    node.driver.add(SMALL)
    node.labels = {LABEL: "halves"}
    node.pods.synced = False
    with pytest.raises(UsersUnknown):
        await node.rounds(1)
    await node.plugin._round()
    assert (node.driver.layout(), node.plugin.state) == ((SMALL,), "pending")


async def test_a_step_that_the_driver_refuses_leaves_the_gpu_as_it_was_and_offered(node: Node) -> None:
    node.driver.add(SMALL)
    node.driver.refuses = "In use by another client"
    node.labels = {LABEL: "mixed"}
    await node.rounds(3)
    assert node.profiles() == ["1g.10gb"]
    assert node.plugin.state == "failed"
    assert "In use by another client" in node.events[-1][1]
    assert not node.withdrawn
    node.driver.refuses = ""
    node.now_s += RETRY_S
    await node.rounds()
    assert node.profiles() == ["1g.10gb", "3g.40gb"]


async def test_a_plugin_that_is_killed_at_any_step_is_followed_by_one_that_ends_the_change(tmp_path: Path) -> None:
    cut_at, finished = 0, False
    while not finished:
        node = Node(tmp_path)
        node.driver.add(OTHER_HALF)
        kept = node.driver.add(SMALL)
        node.use(kept.uuids[0])
        node.start(cut_at)
        node.labels = {LABEL: "mixed"}
        node.driver.instances[7] = replace(node.driver.add(MigSlot(4, "1g.10gb")), number=7)
        node.driver.instances = {number: one for number, one in node.driver.instances.items() if one.number == number}
        try:
            await node.rounds()
            finished = True
        except Killed:
            pass
        node.start()
        await node.rounds()
        assert node.profiles() == ["1g.10gb", "3g.40gb"], cut_at
        assert node.driver.at(SMALL) == kept
        assert node.plugin.state == "success"
        cut_at += 1
    assert cut_at > 2


async def test_instances_on_demand_stay_where_only_the_mode_is_declared(tmp_path: Path) -> None:
    node = Node(tmp_path, on_demand=True, slots={SMALL})
    node.driver.add(SMALL)
    node.labels = {LABEL: "on-demand"}
    await node.rounds()
    assert (node.driver.layout(), node.plugin.state, node.withdrawn) == ((SMALL,), "success", {})
    node.labels = {LABEL: "halves"}
    await node.rounds()
    assert node.driver.layout() == (SMALL,)
    assert node.withdrawn, "MIG on demand removes them when they are idle"


async def test_mig_mode_is_not_switched_by_default(node: Node) -> None:
    node.driver.on = False
    node.probe()
    node.labels = {LABEL: "halves"}
    await node.rounds(10)
    assert not node.driver.on
    assert not node.withdrawn, "pods may have it as it is"
    assert "migModeIdleSeconds" in node.events[0][1]
    assert node.plugin.state == "pending"

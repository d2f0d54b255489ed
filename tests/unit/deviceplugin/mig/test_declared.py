"""A node follows its declared MIG configuration: nothing in use is touched, a refused one changes nothing, and a killed plugin's successor goes on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from deviceplugin.gpus.offer import Offer
from deviceplugin.mig.declared import BY, RETRY_S, SETTLE_S, DeclaredMig
from deviceplugin.mig.device_users import DeviceUsers, UsersUnknown
from deviceplugin.mig.mode_switch import CLOSE_S, ModeSwitch
from deviceplugin.pod_resources import ContainerDevices
from nvml.mig_changes import carry_out
from tests.unit.deviceplugin.mig.double import Killed, MigDouble, PodsThatHave, Steps, mig_gpu
from vgpu.api.inventory import WITHDRAWN, Gpu, GpuCondition, Inventory, MigInstance, Withdrawal
from vgpu.api.mig import MigSlot
from vgpu.api.mig_device import slot_device
from vgpu.api.names import DEFAULT
from vgpu.health.cordons import Opened
from vgpu.mig.declared import NVIDIA, NVIDIA_STATE
from vgpu.mig.plan import GpuPlan

LABEL = DEFAULT.mig_config
SMALL, HALF, OTHER_HALF = MigSlot(6, "1g.10gb"), MigSlot(4, "3g.40gb"), MigSlot(0, "3g.40gb")
FILE = """\
version: v1
mig-configs:
  halves:
    - devices: all
      mig-enabled: true
      mig-devices: {"3g.40gb": 2}
  mixed:
    - devices: [0]
      mig-enabled: true
      mig-devices: {"1g.10gb": 1, "3g.40gb": 1}
  on-demand:
    - devices: all
      mig-enabled: true
      mig-devices: {}
  not-here:
    - devices: [0]
      mig-enabled: true
      mig-devices: {"1g.5gb": 7}
  no-such-gpu:
    - devices: [0, 5]
      mig-enabled: true
      mig-devices: {"3g.40gb": 2}
"""


class SwitchedDouble(MigDouble):
    """MIG mode is switched; `resets`: only with a reset."""

    resets: bool = False

    def set_mig_mode(self, uuid: str, on: bool) -> bool:  # noqa: ARG002
        self.steps.step()
        if self.resets:
            return False
        self.on = on
        self.instances.clear()
        self.steps.step()
        return True


class NodesPods(PodsThatHave):
    def unreadable(self) -> Sequence[object]:
        return ()


@dataclass
class Node:
    """One GPU, its pods, and the plugin that runs now."""

    folder: Path
    driver: SwitchedDouble = field(default_factory=SwitchedDouble)
    labels: dict[str, str] | None = field(default_factory=dict)
    mode_idle_s: float = 0.0
    on_demand: bool = False
    now_s: float = 0.0
    slots: set[MigSlot] = field(default_factory=set)
    listed: list[ContainerDevices] = field(default_factory=list)
    events: list[tuple[str, str]] = field(default_factory=list)
    open: bool = False

    def __post_init__(self) -> None:
        self.pods, self.done = NodesPods(), {}
        self.file = self.folder / "config.yaml"
        self.file.write_text(FILE)
        self.start()

    def start(self, cut_at: int | None = None) -> None:
        """A new process of the plugin."""
        self.driver.steps = Steps(cut_at)
        self.offer = Offer(DEFAULT, 1024)
        users = DeviceUsers(self.pods, self.offer, DEFAULT, self, self, list)
        self.switch = ModeSwitch(self.mode_idle_s, opened=self._opened, switch=self._switched, clock=lambda: self.now_s)
        self.plugin = DeclaredMig(
            self.file, self.driver, self.offer, users, labels=lambda: self.labels, slots=lambda _: self.slots, on_demand=self.on_demand,
            switch=self.switch, probe=self.probe, published=lambda: None, report=lambda *event: self.events.append(event),
            clock=lambda: self.now_s, now=lambda: self.now_s,
        )  # fmt: skip
        self.probe()

    @property
    def gpu(self) -> Gpu:
        return replace(mig_gpu(), mig=self.driver.on)

    def probe(self) -> None:
        found = [(one, MigSlot(one.start, one.profile)) for one in self.driver.instances.values() if one.complete]
        instances = tuple(MigInstance(one.uuids[0], slot.profile, 1, one.number, 0, slot.start) for one, slot in found)
        self.offer.set_inventory(Inventory((replace(self.gpu, instances=instances),)))

    async def holdings(self, domain: str) -> Sequence[ContainerDevices]:
        assert domain == DEFAULT.domain
        return self.listed

    def _opened(self, gpus: Sequence[Gpu]) -> Opened:
        closed = {gpu.uuid for gpu in gpus if gpu.uuid in self.switch.withheld and not self.open}
        return Opened(frozenset(closed))

    def _switched(self, plan: GpuPlan) -> None:
        assert self.switch.withheld == {self.gpu.uuid}, "our own handles are not closed"
        carry_out([plan], self.driver, lambda _: self.driver.table)

    async def rounds(self, count: int = 4) -> None:
        for _ in range(count):
            await self.plugin.once()
            self.now_s += SETTLE_S

    def use(self, uuid: str) -> None:
        self.listed = [ContainerDevices("default", "p", "main", "r", frozenset({uuid}))]

    @property
    def withdrawn(self) -> Mapping[str, GpuCondition]:
        return self.offer.withdrawn_by(BY)

    def profiles(self) -> list[str]:
        return sorted(slot.profile for slot in self.driver.layout())


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


def mode_node(folder: Path) -> Node:
    node = Node(folder, mode_idle_s=60.0)
    node.driver.on = False
    node.probe()
    node.labels = {LABEL: "halves"}
    return node


async def until_idle(node: Node) -> None:
    await node.plugin.once()
    node.now_s += 59.0
    await node.plugin.once()
    assert not node.withdrawn
    node.now_s += 1.0


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

"""A node of one GPU that follows its declared MIG configuration, with driver, pods and labels as the test says."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from deviceplugin.gpus.offer import Offer
from deviceplugin.mig.declared import BY, CHECK_S, SETTLE_S, DeclaredMig
from deviceplugin.mig.device_users import DeviceUsers
from deviceplugin.mig.mode_switch import ModeSwitch
from deviceplugin.pod_resources import ContainerDevices
from nvml.mig_changes import carry_out
from tests.unit.deviceplugin.mig.double import MigDouble, PodsThatHave, Steps, mig_gpu
from vgpu.api.inventory import Gpu, GpuCondition, Inventory, MigInstance
from vgpu.api.mig import MigSlot
from vgpu.api.names import DEFAULT
from vgpu.health.cordons import Opened
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
  "off":
    - devices: all
      mig-enabled: false
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
    lists: int = 0
    """How often the kubelet's list was read."""

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
        self.lists += 1
        return self.listed

    def _opened(self, gpus: Sequence[Gpu]) -> Opened:
        closed = {gpu.uuid for gpu in gpus if gpu.uuid in self.switch.withheld and not self.open}
        return Opened(frozenset(closed))

    def _switched(self, plan: GpuPlan) -> None:
        assert self.switch.withheld == {self.gpu.uuid}, "our own handles are not closed"
        carry_out([plan], self.driver, lambda _: self.driver.table)

    async def paced(self, count: int) -> None:
        """As the plugin itself calls for so many rounds."""
        for _ in range(count):
            await self.plugin._round()
            self.now_s += CHECK_S

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

"""A node in one process: the kubelet with its records, the API's pods, running processes and the disk are models; the plugin's parts are real.

The models are the obvious slow ones: which process runs, what it mounts and what it uses is written down at each event, and after each step the
invariants are counted from that alone (`SimulatedNode.check`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Collection
from pathlib import Path
from typing import Any, Final
from uuid import UUID

from deviceplugin.grants.spares import KEPT
from deviceplugin.pod_resources import ContainerDevices, holders
from kube.objects import Pod
from tests.unit.deviceplugin.builders import uuid
from tests.unit.deviceplugin.simulated_plugin import (
    GPUS,
    CallRefused,
    GrpcContext,
    Killed,
    SimulatedPlugin,
    cut_after,
)
from tests.unit.deviceplugin.workloads import MEM, SimulatedPod, SimulatedProcess
from vgpu.api.codec import grant_from_text
from vgpu.api.contract import CONTAINER_DIR
from vgpu.api.grant import GrantGpu
from vgpu_pb import deviceplugin_pb2 as pb

UNITS: Final = 16


class SimulatedNode:
    """A node: the kubelet with its records, the disk, processes, and a plugin."""

    blind = False

    def __init__(self, folder: Path) -> None:
        self.state, self.image = folder / "state", folder / "image.so"
        self.image.write_bytes(b"library 0")
        self.now = 0.0
        self.boots = 1
        self.pods: dict[str, SimulatedPod] = {}
        """By UID, as the API has them."""
        self.processes: list[SimulatedProcess] = []
        self.count = self.kills = self.refusals = self.given_up = 0
        self.plugin: SimulatedPlugin | None = None

    @property
    def boot(self) -> str:
        return f"boot {self.boots}"

    # --- what the plugin reads ---

    async def holdings(self, domain: str) -> tuple[ContainerDevices, ...]:  # noqa: ARG002
        return tuple(
            ContainerDevices("default", one.name, container, resource, frozenset(ids))
            for one in self.pods.values()
            for (container, resource), ids in one.held.items()
            if container != "setup"  # the kubelet lists no init container
        )

    async def holders(self, resource: str, ids: Collection[str]) -> tuple[tuple[str, str] | None, tuple[str, ...]]:
        return holders(await self.holdings(""), resource, ids)

    async def fetch(self, namespace: str, name: str) -> Pod | None:  # noqa: ARG002
        return next((one.seen() for one in self.pods.values() if one.name == name), None)

    def living(self, uids: Collection[str]) -> frozenset[str]:
        return frozenset(process.of.uid for process in self.processes).intersection(uids)

    # --- what happens ---

    async def working(self, changes: int | None = None) -> SimulatedPlugin:
        """The plugin, started anew when it is not there; while it starts it may be killed, and is started again then."""
        while self.plugin is None:
            made = SimulatedPlugin(self)
            if await self.survives(made.begin(), changes):
                self.plugin = made
            changes = None
        return self.plugin

    async def survives(self, work: Awaitable[object], changes: int | None) -> bool:
        try:
            with cut_after(changes):
                await work
                if self.plugin is not None:
                    await self.plugin.grants.durability.ended(self.plugin.grants.durability.under_way)
        except Killed:
            self.plugin = None
            self.kills += 1
            return False
        return True

    async def admit(self, gpu: int, units: int, init_units: int, core: int, changes: int | None) -> None:
        """The extender places a pod by what it knows, and the kubelet admits it."""
        plugin = await self.working()
        if not self.has_room(gpu, max(units, init_units), core, plugin):
            return
        self.count += 1
        names = {one.name for one in self.pods.values()}
        name = next(n for n in (f"p{self.count % 4}", f"p{self.count}") if n not in names)
        one = SimulatedPod(str(UUID(int=self.count)), name, gpu, units, init_units, core)
        self.pods[one.uid] = one
        self.show(one)
        await plugin.orphans.once()
        reusable: dict[str, tuple[str, ...]] = {}
        for container, quantity in one.containers:
            for resource, wanted in one.wants(container, quantity).items():
                ids = await self.choose(plugin, resource, reusable.get(resource, ()), wanted)
                if not await self.allocated(plugin, one, container, resource, ids, changes):
                    self.fail(one)
                    return
                reusable[resource] = ids
        one.admitted = True
        self.show(one)

    def has_room(self, gpu: int, units: int, core: int, plugin: SimulatedPlugin) -> bool:
        """As the extender counts: pods that the API has, and orphans that the inventory names."""
        held = [one.assignment.held() for one in self.pods.values() if one.phase != "Failed"]
        held += [orphan.held for orphan in plugin.offer.inventory().orphans if orphan.uid not in self.pods]
        mib, percent = sums(held)
        return mib[uuid(gpu)] + units * 1024 <= UNITS * 1024 and percent[uuid(gpu)] + core <= 100

    async def choose(
        self, plugin: SimulatedPlugin, resource: str, reusable: tuple[str, ...], quantity: int
    ) -> tuple[str, ...]:
        taken = reusable[:quantity]
        if len(taken) == quantity:
            return taken
        per_gpu = UNITS if resource == MEM else 100
        used = {i for one in self.pods.values() for (_, r), ids in one.held.items() if r == resource for i in ids}
        available = {f"{uuid(gpu)}-{slot}" for gpu in range(GPUS) for slot in range(per_gpu)} - used
        preferred = await plugin.ledger.prefer(resource, sorted(available | set(taken)), taken, quantity)
        in_use = self.in_use(resource)
        assert in_use.isdisjoint(set(preferred) - set(taken)), "devices that a living process uses are never named"
        rest = [one for one in preferred if one in available and one not in taken]
        rest += [one for one in sorted(available) if one not in rest and one not in taken]
        return (*taken, *rest)[:quantity]

    def in_use(self, resource: str, but: str = "") -> frozenset[str]:
        """Device IDs that living processes use."""
        return frozenset(i for p in self.processes if p.of.uid != but for i in p.ids.get(resource, ()))

    async def allocated(
        self,
        plugin: SimulatedPlugin,
        one: SimulatedPod,
        container: str,
        resource: str,
        ids: tuple[str, ...],
        changes: int | None,
    ) -> bool:
        request = pb.AllocateRequest(container_requests=[pb.ContainerAllocateRequest(devices_ids=ids)])
        answers: list[Any] = []

        async def allocate() -> None:
            answers.append(await plugin.services[resource].Allocate(request, GrpcContext()))

        try:
            if not await self.survives(allocate(), changes):
                return False
        except CallRefused:
            self.refusals += 1
            assert self.overfull(one.gpu) or not self.in_use(resource).isdisjoint(ids), "a refusal has a reason"
            return False
        assert self.in_use(resource, but=one.uid).isdisjoint(ids), (
            "devices that a living process uses are allocated to no pod"
        )
        one.held[container, resource] = ids
        if resource == MEM:
            (answer,) = answers[0].container_responses
            one.mounts[container] = Path(next(m.host_path for m in answer.mounts if m.container_path == CONTAINER_DIR))
        return True

    async def start(self, number: int, changes: int | None) -> None:
        """The next container of some pod, or its last once more."""
        admitted = [one for one in self.pods.values() if one.admitted and one.held]
        if not admitted:
            return
        one = admitted[number % len(admitted)]
        container = "setup" if one.init_units and not one.initialized and one.running != "setup" else "main"
        if container == "main" and one.init_units and not one.initialized:
            one.initialized = True
            self.show(one)
        await self.start_container(one, container, changes)

    async def start_again(self, number: int, changes: int | None) -> None:
        """The container that ran last, which crashed."""
        running = [one for one in self.pods.values() if one.admitted and one.held and one.running]
        if running:
            one = running[number % len(running)]
            await self.start_container(one, one.running, changes)

    async def start_container(self, one: SimulatedPod, container: str, changes: int | None) -> None:
        plugin = await self.working()
        one.running = ""
        self.processes = [process for process in self.processes if process.of is not one]
        ids = one.held[container, MEM]
        if await self.survives(plugin.prestart(MEM, ids), changes):
            one.running = container
            held = {
                resource: frozenset(i for (_, r), ids in one.held.items() if r == resource for i in ids)
                for resource in (MEM,)
            }
            mount = one.mounts[container]
            self.processes.append(SimulatedProcess(one, container, mount, mount.stat().st_ino, held))

    async def remove(self, number: int) -> None:
        """In order: the processes end, then the API forgets the pod."""
        if one := self.some_pod(number):
            self.fail(one)
            self.processes = [process for process in self.processes if process.of is not one]
            self.forget(one)

    async def remove_by_force(self, number: int) -> None:
        """The API forgets the pod and the kubelet does too; what runs goes on."""
        if one := self.some_pod(number):
            self.given_up += any(process.of is one for process in self.processes)
            self.forget(one)

    def some_pod(self, number: int) -> SimulatedPod | None:
        return sorted(self.pods.values(), key=lambda p: p.name)[number % len(self.pods)] if self.pods else None

    def forget(self, one: SimulatedPod) -> None:
        del self.pods[one.uid]
        if self.plugin:
            self.plugin.pods.on_change(one.seen(), None)

    async def end(self, number: int) -> None:
        """A process of a pod that was deleted by force ends at last."""
        gone = [process for process in self.processes if process.of.uid not in self.pods]
        if gone:
            self.processes.remove(gone[number % len(gone)])

    async def lose_checkpoint(self) -> None:
        """The kubelet starts without its checkpoint: it knows of no device that is in use. What runs goes on."""
        for one in self.pods.values():
            one.held = {}

    async def reboot(self) -> None:
        self.processes, self.plugin = [], None
        self.boots += 1
        for one in self.pods.values():
            one.running = ""

    async def look(self) -> None:
        await (await self.working()).orphans.once()

    async def look_after(self, later_s: float, changes: int | None) -> None:
        plugin = await self.working()
        self.now = max(self.now, newest(self.state)) + later_s
        await self.survives(plugin.upkeep.once(), changes)

    def fail(self, one: SimulatedPod) -> None:
        """The kubelet has let go of it: its devices are free."""
        one.held, one.phase, one.admitted, one.running = {}, "Failed", False, ""
        self.show(one)

    def show(self, one: SimulatedPod) -> None:
        if self.plugin:
            self.plugin.pods.on_change(self.plugin.pods.pod(one.uid), one.seen())

    # --- what must be so, after each step ---

    def overfull(self, gpu: int) -> bool:
        """Is more of a GPU assigned than it has, over pods that the API has and pods of which a process lives? (I1)"""
        using = {id(one): one for one in self.pods.values() if one.phase != "Failed"}
        using |= {id(process.of): process.of for process in self.processes}
        mib, percent = sums(one.assignment.held() for one in using.values())
        return mib[uuid(gpu)] > UNITS * 1024 or percent[uuid(gpu)] > 100

    def check(self) -> None:
        for path in self.state.glob("grants/*/grant"):
            grant_from_text(path.read_text())  # any reader now reads a whole one
        assert not any(self.overfull(gpu) for gpu in range(GPUS))  # I1
        for process in self.processes:  # I2: what it mounted is there, and has what its pod was assigned
            assert process.mount.stat().st_ino == process.inode
            grant = grant_from_text((process.mount / "grant").read_text())
            (assigned,) = process.of.gpus[process.container]
            assert (grant.uid, grant.pod, grant.container) == (process.of.uid, process.of.name, process.container)
            assert grant.gpus == (GrantGpu(assigned.uuid, assigned.mib, assigned.core_percent),)
            assert str((process.mount / "arbiter.sock").readlink()) == "socket/arbiter.sock"
            assert (process.mount / "socket").is_dir()  # over it is mounted what follows
            assert (self.state / "sockets" / process.mount.name).is_dir()
            assert (process.mount / "libtangram.so").read_bytes().startswith(b"library ")
            assert (self.state / "preload").read_text() == "/.tangram/libtangram.so\n"
            assert (self.state / "ld.so.preload").read_text() == "/run/tangram/libtangram.so\n"

    async def check_end(self, later_s: float) -> None:
        """An admitted pod can still start; and when all are gone, so is everything but what a new plugin installs."""
        for number, _ in enumerate([one for one in self.pods.values() if one.admitted and one.held]):
            for _ in range(2):
                await self.start(number, None)
                self.check()
        while self.pods:
            await self.remove(0)
        self.processes = []
        self.plugin = None
        await self.look_after(later_s, None)
        last = await self.working()
        assert last.offer.inventory().orphans == ()
        left = sorted(str(path.relative_to(self.state)) for path in self.state.rglob("*"))
        (library,) = (self.state / "lib").iterdir()
        folders = [
            "grants",
            "ld.so.preload",
            "lib",
            f"lib/{library.name}",
            f"lib/{library.name}/libtangram.so",
            "pods",
            "pods/.new",
            "preload",
            "sockets",
        ]
        spares = sorted(last.grants.spares.names)
        assert len(spares) == KEPT
        for name in spares:
            parts = (".allocation.json.new", ".grant.new", ".socket", "arbiter.sock", "libtangram.so", "socket")
            folders += [f"grants/{name}", *(f"grants/{name}/{part}" for part in parts)]
        assert left == sorted(folders)


def sums(held: Any) -> tuple[Counter[str], Counter[str]]:
    """GPU -> MiB, and GPU -> percent."""
    mib, percent = Counter[str](), Counter[str]()
    for gpus in held:
        for assigned in gpus:
            mib[assigned.uuid] += assigned.mib
            percent[assigned.uuid] += assigned.core_percent
    return mib, percent


def newest(root: Path) -> float:
    return max(path.lstat().st_mtime for path in root.rglob("*"))

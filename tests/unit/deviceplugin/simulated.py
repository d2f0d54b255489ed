"""A node in one process: the kubelet with its records, the API's pods, running processes and the disk are models; the plugin's parts are real.

The models are the obvious slow ones: who runs, what it mounts and what it uses is written down at each event, and after each step the
invariants are counted from that alone (`Machine.check`).
"""

from __future__ import annotations

import itertools
import os
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, NoReturn
from uuid import UUID

import pytest

from deviceplugin.admission import PreStart
from deviceplugin.allocation import Request
from deviceplugin.device_ledger import Ledger
from deviceplugin.gpus.offer import Offer
from deviceplugin.grants.directories import Grants
from deviceplugin.grants.spares import KEPT
from deviceplugin.metrics import Metrics
from deviceplugin.pod_resources import Holding, holders
from deviceplugin.pods.node_pods import NodePods
from deviceplugin.pods.orphans import Orphans
from deviceplugin.pods.usage_records import UsageRecords
from deviceplugin.service import Service
from deviceplugin.upkeep import Upkeep, restore
from kube.objects import Pod
from tests.unit.deviceplugin.builders import inventory, uuid
from tests.unit.deviceplugin.workloads import CORE, MEM, Pods, Process
from vgpu.api.codec import grant_from_text
from vgpu.api.contract import CONTAINER_DIR
from vgpu.api.grant import GrantGpu
from vgpu.api.names import DEFAULT
from vgpu_pb import deviceplugin_pb2 as pb

GPUS: Final = 2
UNITS: Final = 16
CHANGES: Final = (
    "mkdir", "unlink", "remove", "rename", "replace", "link", "symlink", "rmdir", "chmod", "fchmod", "ftruncate", "open", "write", "fsync",
)  # fmt: skip
"""Functions of `os` by which files change, or stay changed."""


class Killed(BaseException):
    """As SIGKILL: nothing that follows has an effect."""


@contextmanager
def cut_after(changes: int | None) -> Iterator[None]:
    """From this many changes of files on, each raises; None = never."""
    made = itertools.count()

    def counted(change: Callable[..., Any]) -> Callable[..., Any]:
        def act(*args: Any, **more: Any) -> Any:
            if changes is not None and next(made) >= changes:
                raise Killed
            return change(*args, **more)

        return act

    with pytest.MonkeyPatch.context() as patch:
        for name in CHANGES:
            patch.setattr(os, name, counted(getattr(os, name)))
        yield


class Refusal(Exception):
    """What the kubelet gets instead of an answer."""


class Context:
    async def abort(self, code: object, text: str) -> NoReturn:  # noqa: ARG002
        raise Refusal(text)


class Nobody:
    def served(self, call: str, resource: str, seconds: float) -> None: ...
    def refused(self, call: str, request: Request, error: Exception) -> None: ...
    def forget_the_gone(self, alive: Collection[str]) -> None: ...


class Plugin:
    """A process: what it remembers is gone with it."""

    def __init__(self, machine: Machine) -> None:
        self.pods = NodePods(DEFAULT, 1024)
        self.offer = Offer(DEFAULT, 1024)
        self.offer.set_inventory(inventory(GPUS))
        self.grants = Grants(machine.state, machine.image, boot=machine.boot)
        self.usage_records = UsageRecords(machine.state, machine.boot)
        self.grants.settling.rest = self.afterwards  # type: ignore[method-assign]  # at once: a thread cannot be cut
        self.orphans = Orphans(self.usage_records, self.pods, machine, self.offer.set_orphans)
        self.ledger = Ledger(
            self.pods,
            self.offer.inventory,
            DEFAULT,
            patience_s=0.0,
            orphans=self.orphans,
            users=self.usage_records.users,
        )
        parts: Any = {
            "pods": self.pods, "records": machine, "ledger": self.ledger, "grants": self.grants, "usage_records": self.usage_records,
        }  # fmt: skip
        self.prestart = PreStart(DEFAULT, 1024, inventory=self.offer.inventory, fetch=machine.fetch, **parts)
        self.services = {
            resource: Service(
                resource, offer=self.offer, ledger=self.ledger, grants=self.grants, prestart=self.prestart,
                state_root=machine.state, observer=Nobody(),
            )
            for resource in (MEM, CORE)
        }  # fmt: skip
        nobody: Any = Nobody()
        self.upkeep = Upkeep(
            DEFAULT, orphans=self.orphans, remover=nobody, metrics=Metrics(), now=lambda: machine.now, **parts
        )
        self.machine = machine

    def afterwards(self) -> None:
        self.grants.fill_spares()
        self.usage_records.begin_next()

    async def begin(self) -> None:
        self.grants.install()
        self.usage_records.load()
        for one in self.machine.pods.values():
            self.pods.on_change(None, one.seen())
        records: Any = self.machine
        await restore(records, self.pods, self.ledger, self.grants, self.usage_records, DEFAULT)
        await self.orphans.once()


class Machine:
    """A node: the kubelet with its records, the disk, processes, and a plugin."""

    blind = False

    def __init__(self, folder: Path) -> None:
        self.state, self.image = folder / "state", folder / "image.so"
        self.image.write_bytes(b"library 0")
        self.now = 0.0
        self.boots = 1
        self.pods: dict[str, Pods] = {}
        """By UID, as the API has them."""
        self.processes: list[Process] = []
        self.count = self.kills = self.refusals = self.given_up = 0
        self.plugin: Plugin | None = None

    @property
    def boot(self) -> str:
        return f"boot {self.boots}"

    # --- what the plugin reads ---

    async def holdings(self, domain: str) -> tuple[Holding, ...]:  # noqa: ARG002
        return tuple(
            Holding("default", one.name, container, resource, frozenset(ids))
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

    async def working(self, changes: int | None = None) -> Plugin:
        """The plugin, started anew when it is not there; while it starts it may be killed, and is started again then."""
        while self.plugin is None:
            made = Plugin(self)
            if await self.survives(made.begin(), changes):
                self.plugin = made
            changes = None
        return self.plugin

    async def survives(self, work: Awaitable[object], changes: int | None) -> bool:
        try:
            with cut_after(changes):
                await work
                if self.plugin is not None:
                    await self.plugin.grants.settling.ended(self.plugin.grants.settling.under_way)
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
        one = Pods(str(UUID(int=self.count)), name, gpu, units, init_units, core)
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

    def has_room(self, gpu: int, units: int, core: int, plugin: Plugin) -> bool:
        """As the extender counts: pods that the API has, and orphans that the inventory names."""
        held = [one.assignment.held() for one in self.pods.values() if one.phase != "Failed"]
        held += [orphan.held for orphan in plugin.offer.inventory().orphans if orphan.uid not in self.pods]
        mib, percent = sums(held)
        return mib[uuid(gpu)] + units * 1024 <= UNITS * 1024 and percent[uuid(gpu)] + core <= 100

    async def choose(self, plugin: Plugin, resource: str, reusable: tuple[str, ...], quantity: int) -> tuple[str, ...]:
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
        """Device IDs that living processes hold."""
        return frozenset(i for p in self.processes if p.of.uid != but for i in p.ids.get(resource, ()))

    async def allocated(
        self, plugin: Plugin, one: Pods, container: str, resource: str, ids: tuple[str, ...], changes: int | None
    ) -> bool:
        request = pb.AllocateRequest(container_requests=[pb.ContainerAllocateRequest(devices_ids=ids)])
        answers: list[Any] = []

        async def allocate() -> None:
            answers.append(await plugin.services[resource].Allocate(request, Context()))

        try:
            if not await self.survives(allocate(), changes):
                return False
        except Refusal:
            self.refusals += 1
            assert self.overfull(one.gpu) or not self.in_use(resource).isdisjoint(ids), "a refusal has a reason"
            return False
        assert self.in_use(resource, but=one.uid).isdisjoint(ids), (
            "devices that a living process uses are given to nobody"
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

    async def start_container(self, one: Pods, container: str, changes: int | None) -> None:
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
            self.processes.append(Process(one, container, mount, mount.stat().st_ino, held))

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

    def some_pod(self, number: int) -> Pods | None:
        return sorted(self.pods.values(), key=lambda p: p.name)[number % len(self.pods)] if self.pods else None

    def forget(self, one: Pods) -> None:
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

    def fail(self, one: Pods) -> None:
        """The kubelet has let go of it: its devices are free."""
        one.held, one.phase, one.admitted, one.running = {}, "Failed", False, ""
        self.show(one)

    def show(self, one: Pods) -> None:
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
            grant_from_text(path.read_text())  # whoever reads it now, reads a whole one
        assert not any(self.overfull(gpu) for gpu in range(GPUS))  # I1
        for process in self.processes:  # I2: what it mounted is there, and says what its pod was assigned
            assert process.mount.stat().st_ino == process.inode
            grant = grant_from_text((process.mount / "grant").read_text())
            (piece,) = process.of.pieces[process.container]
            assert (grant.uid, grant.pod, grant.container) == (process.of.uid, process.of.name, process.container)
            assert grant.gpus == (GrantGpu(piece.uuid, piece.mib, piece.core_percent),)
            assert str((process.mount / "arbiter.sock").readlink()) == "socket/arbiter.sock"
            assert (process.mount / "socket").is_dir()  # over it is mounted what follows
            assert (self.state / "sockets" / process.mount.name).is_dir()
            assert (process.mount / "libtangram.so").read_bytes().startswith(b"library ")
            assert (self.state / "preload").read_text() == "/.tangram/libtangram.so\n"
            assert (self.state / "ld.so.preload").read_text() == "/run/tangram/libtangram.so\n"

    async def check_end(self, later_s: float) -> None:
        """Who was admitted can still start; and when all are gone, so is everything but what a new plugin installs."""
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
    for pieces in held:
        for piece in pieces:
            mib[piece.uuid] += piece.mib
            percent[piece.uuid] += piece.core_percent
    return mib, percent


def newest(root: Path) -> float:
    return max(path.lstat().st_mtime for path in root.rglob("*"))

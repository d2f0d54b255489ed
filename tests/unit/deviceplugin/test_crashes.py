"""A plugin killed between any two changes of a file: nothing granted is lost, nobody is refused for it later, nothing stays for ever.

The kill is simulated: from the chosen change on, every change of a file raises, also in `except` and `finally`.
The kubelet, its books and the watch are models; ledger, grants, service, PreStart and upkeep are the real ones.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import shutil
import tempfile
from collections.abc import Awaitable, Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NoReturn

import msgspec
import pytest
from hypothesis import event, example, given, settings
from hypothesis import strategies as st

from deviceplugin.allocate import Request
from deviceplugin.grants import Grants
from deviceplugin.ledger import Ledger
from deviceplugin.metrics import Metrics
from deviceplugin.offer import Offer
from deviceplugin.podresources import Holding, holders
from deviceplugin.pods import NodePods
from deviceplugin.prestart import PreStart
from deviceplugin.server import Service
from deviceplugin.upkeep import ENDED_AGE_S, GARBAGE_AGE_S, Upkeep, restore
from kube.objects import Pod
from tests.builders import pod
from tests.examples import examples
from tests.unit.deviceplugin.builders import inventory, uuid
from vgpu.codec import assignment_to_json, grant_from_text
from vgpu.contract import grant_key
from vgpu.grant import Assignment, GrantCard, Slice
from vgpu.names import DEFAULT
from vgpu_pb import deviceplugin_pb2 as pb

MEM: Final = DEFAULT.gpu_mem
CHANGES: Final = ("mkdir", "unlink", "remove", "rename", "replace", "link", "rmdir", "chmod", "fchmod", "open")
"""Functions of `os` by which files change."""


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


@dataclass
class Pods:
    """A pod as the kubelet has it."""

    name: str
    card: int
    units: int
    init_units: int
    """0 = it has no init container."""
    phase: str = "Pending"
    admitted: bool = False
    initialized: bool = False
    held: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """Container -> device IDs."""
    running: str = ""

    @property
    def containers(self) -> list[tuple[str, int]]:
        return [*([("setup", self.init_units)] if self.init_units else []), ("main", self.units)]

    def seen(self) -> Pod:
        """As the watch shows it."""
        made, pieces = pod(self.name), {}
        for container, units in self.containers:
            made = made.asking(mib=units * 1024, container=container, init=container == "setup")
            pieces[container] = (Slice(uuid(self.card), self.card, units * 1024),)
        text = assignment_to_json(Assignment(pieces, frozenset(pieces) & {"setup"}))
        plain = made.on("n1").assigned(text=text).with_phase(self.phase, started=self.admitted).plain()
        if self.initialized:
            plain["status"]["conditions"] = [{"type": "Initialized", "status": "True"}]
        return msgspec.json.decode(msgspec.json.encode(plain), type=Pod)


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
        self.offer.set_inventory(inventory(2))
        self.grants = Grants(machine.state, machine.image)
        self.ledger = Ledger(self.pods, self.offer.inventory, DEFAULT, patience_s=0.0)
        parts: Any = {"pods": self.pods, "books": machine, "ledger": self.ledger, "grants": self.grants}
        self.prestart = PreStart(DEFAULT, 1024, inventory=self.offer.inventory, fetch=machine.fetch, **parts)
        self.service = Service(
            MEM, offer=self.offer, ledger=self.ledger, grants=self.grants, prestart=self.prestart,
            state_root=machine.state, observer=Nobody(),
        )  # fmt: skip
        nobody: Any = Nobody()
        self.upkeep = Upkeep(
            DEFAULT, prestart=self.prestart, remover=nobody, metrics=Metrics(), now=lambda: machine.now, **parts
        )
        self.machine = machine

    async def begin(self) -> None:
        self.grants.install()
        for one in self.machine.pods.values():
            self.pods.on_change(None, one.seen())
        books: Any = self.machine
        await restore(books, self.pods, self.ledger, self.grants, DEFAULT)


class Machine:
    """A node: the kubelet with its books, the disk, and a plugin."""

    def __init__(self, folder: Path) -> None:
        self.state, self.image = folder / "state", folder / "image.so"
        self.image.write_bytes(b"library 0")
        self.now = 0.0
        self.pods: dict[str, Pods] = {}
        self.used: set[str] = set()
        self.count = self.kills = 0
        self.plugin: Plugin | None = None

    # --- what the plugin asks ---

    async def holdings(self, domain: str) -> tuple[Holding, ...]:  # noqa: ARG002
        return tuple(
            Holding("default", one.name, container, MEM, frozenset(ids))
            for one in self.pods.values()
            for container, ids in one.held.items()
            if container != "setup"  # the kubelet lists no init container
        )

    async def holders(self, resource: str, ids: Collection[str]) -> tuple[tuple[str, str] | None, tuple[str, ...]]:
        return holders(await self.holdings(""), resource, ids)

    async def fetch(self, namespace: str, name: str) -> Pod | None:  # noqa: ARG002
        return self.pods[name].seen() if name in self.pods else None

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
        except Killed:
            self.plugin = None
            self.kills += 1
            return False
        return True

    async def admit(self, card: int, units: int, init_units: int, changes: int | None) -> None:
        free = 16 - sum(max(p.units, p.init_units) for p in self.pods.values() if p.card == card)
        if max(units, init_units) > free:
            return
        self.count += 1
        one = Pods(f"p{self.count}", card, units, init_units)
        plugin = await self.working()
        self.pods[one.name] = one
        self.show(one)
        reusable: tuple[str, ...] = ()
        for container, quantity in one.containers:
            ids = await self.choose(plugin, reusable, quantity)
            self.used |= set(ids)
            one.held[container] = reusable = ids
            request = pb.AllocateRequest(container_requests=[pb.ContainerAllocateRequest(devices_ids=ids)])
            if not await self.survives(plugin.service.Allocate(request, Context()), changes):
                self.fail(one)
                return
        one.admitted = True
        self.show(one)

    async def choose(self, plugin: Plugin, reusable: tuple[str, ...], quantity: int) -> tuple[str, ...]:
        taken = reusable[:quantity]
        available = {f"{uuid(card)}-{slot}" for card in range(2) for slot in range(16)} - self.used
        preferred = await plugin.ledger.prefer(MEM, sorted(available | set(taken)), taken, quantity)
        assert len(preferred) == quantity
        return (*taken, *(one for one in preferred if one not in taken))[:quantity]

    async def start(self, number: int, changes: int | None) -> None:
        """The next container of some pod, or its last once more."""
        admitted = [one for one in self.pods.values() if one.admitted]
        if not admitted:
            return
        one = admitted[number % len(admitted)]
        container = "setup" if one.init_units and not one.initialized and one.running != "setup" else "main"
        if container == "main" and one.init_units and not one.initialized:
            one.initialized = True
            self.show(one)
        plugin = await self.working()
        one.running = ""
        if await self.survives(plugin.prestart(MEM, one.held[container]), changes):
            one.running = container

    async def remove(self, number: int) -> None:
        if self.pods:
            one = sorted(self.pods.values(), key=lambda p: p.name)[number % len(self.pods)]
            self.fail(one)
            del self.pods[one.name]
            if self.plugin:
                self.plugin.pods.on_change(one.seen(), None)

    async def look_after(self, later_s: float, changes: int | None) -> None:
        plugin = await self.working()
        self.now = max(self.now, newest(self.state)) + later_s
        await self.survives(plugin.upkeep.once(), changes)

    def fail(self, one: Pods) -> None:
        """The kubelet has let go of it: its devices are free."""
        others = {i for p in self.pods.values() if p is not one for ids in p.held.values() for i in ids}
        self.used = others
        one.held, one.phase, one.admitted, one.running = {}, "Failed", False, ""
        self.show(one)

    def show(self, one: Pods) -> None:
        if self.plugin:
            self.plugin.pods.on_change(self.plugin.pods.pod(f"uid-default-{one.name}"), one.seen())

    # --- what must be so, after each step ---

    def check(self) -> None:
        for path in self.state.glob("grants/*/grant"):
            grant_from_text(path.read_text())  # whoever reads it now, reads a whole one
        for one in self.pods.values():
            if one.running:
                folder = self.state / "grants" / grant_key(one.held[one.running])
                grant = grant_from_text((folder / "grant").read_text())
                units = dict(one.containers)[one.running]
                assert (grant.pod, grant.container) == (one.name, one.running)
                assert grant.cards == (GrantCard(uuid(one.card), units * 1024, 0),)
                assert (folder / "libtangram.so").read_bytes().startswith(b"library ")
                assert (self.state / "ld.so.preload").read_text() == "/run/tangram/libtangram.so\n"

    async def check_end(self) -> None:
        """Who was admitted can still start; and when all are gone, so is everything but what a new plugin installs."""
        for number, _ in enumerate([one for one in self.pods.values() if one.admitted]):
            for _ in range(2):
                await self.start(number, None)
                self.check()
        while self.pods:
            await self.remove(0)
        self.plugin = None
        await self.look_after(2 * GARBAGE_AGE_S, None)
        left = sorted(str(path.relative_to(self.state)) for path in self.state.rglob("*"))
        (library,) = (self.state / "lib").iterdir()
        assert left == ["grants", "ld.so.preload", "lib", f"lib/{library.name}", f"lib/{library.name}/libtangram.so"]


def newest(root: Path) -> float:
    return max(path.stat().st_mtime for path in root.rglob("*"))


kill_after = st.none() | st.integers(0, 24)
steps = st.lists(
    st.one_of(
        st.tuples(st.just("admit"), st.integers(0, 1), st.sampled_from([1, 2, 4]), st.sampled_from([0, 0, 2, 4]), kill_after),
        st.tuples(st.just("start"), st.integers(0, 5), kill_after),
        st.tuples(st.just("remove"), st.integers(0, 5)),
        st.tuples(st.just("look after"), st.sampled_from([0.0, 2 * ENDED_AGE_S, 2 * GARBAGE_AGE_S]), kill_after),
        st.tuples(st.just("restart"), kill_after),
        st.tuples(st.just("upgrade"), st.integers(1, 3), kill_after),
    ),
    max_size=14,
)  # fmt: skip


async def live_through(machine: Machine, done: list[tuple[Any, ...]]) -> None:
    for step in done:
        match step:
            case ("admit", card, units, init_units, changes):
                await machine.admit(card, units, init_units, changes)
            case ("start", number, changes):
                await machine.start(number, changes)
            case ("remove", number):
                await machine.remove(number)
            case ("look after", later_s, changes):
                await machine.look_after(later_s, changes)
            case ("restart", changes):
                machine.plugin = None
                await machine.working(changes)
            case ("upgrade", version, changes):
                machine.image.write_bytes(b"library %d" % version)
                machine.plugin = None
                await machine.working(changes)
        machine.check()
    await machine.check_end()


def run(done: list[tuple[Any, ...]]) -> Machine:
    folder = Path(tempfile.mkdtemp(prefix="crash-"))
    try:
        machine = Machine(folder)
        asyncio.run(live_through(machine, done))
        return machine
    finally:
        shutil.rmtree(folder)


@pytest.fixture(autouse=True)
def _arbiter_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deviceplugin.prestart.listens", lambda path: path.parent.is_dir())


BEFORE = [("admit", 0, 4, 0, None), ("start", 0, None), ("admit", 1, 1, 2, None), ("start", 1, None)]
"""A container that runs; and an init container that runs, whose app container waits for half of its devices."""

LATER: Final = ("look after", 2 * GARBAGE_AGE_S, None)


@settings(deadline=None, max_examples=examples(80))
@example([("restart", None), LATER])
@example([("restart", None), LATER, ("start", 1, None), ("restart", None), LATER])
@example([("start", 1, 3), ("restart", None), LATER, ("start", 1, None), LATER])
@given(steps)
def test_whenever_the_plugin_is_killed_nothing_granted_is_lost_and_nothing_stays_for_ever(
    done: list[tuple[Any, ...]],
) -> None:
    event(f"kills: {run([*BEFORE, *done]).kills}")


@pytest.mark.parametrize(
    "step",
    [
        lambda n: [("admit", 0, 2, 0, n)],
        lambda n: [("admit", 0, 2, 4, n)],
        lambda n: [("remove", 0), ("admit", 0, 4, 0, n)],  # the folder is there already
        lambda n: [("admit", 0, 2, 0, None), ("start", 2, n)],
        lambda n: [("start", 1, n)],
        lambda n: [("upgrade", 1, n), ("start", 0, None)],
        lambda n: [("upgrade", 1, None), ("remove", 0), ("admit", 0, 4, 0, n)],
        lambda n: [("remove", 0), ("look after", 2 * GARBAGE_AGE_S, n)],
    ],
    ids=["allocate", "allocate for an init container", "allocate again", "start", "start after init", "upgrade", "allocate anew", "collect"],
)  # fmt: skip
def test_a_kill_at_each_single_change_in_turn(step: Any) -> None:
    changes = 0
    while run([*BEFORE, *step(changes)]).kills:
        changes += 1
        assert changes < 60
    assert changes > 2  # the step does change files, and each of them was the last one once

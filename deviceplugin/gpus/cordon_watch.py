"""Carry out what operators order about single GPUs: keep new pods off a cordoned GPU, let go of it when nobody has it, and try it before pods get it again.

The decisions are those of `vgpu.health.cordons`. What was cordoned last stays so while the annotation cannot be read. GPUs that are let go of are in a file, which
the NVML supervisor reads: so a plugin that starts while a GPU is being reset does not open it, whether the API server answers or not.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Thread
from typing import Final, Protocol

import structlog

from deviceplugin.gpus.offer import CORDONS, Offer
from deviceplugin.gpus.owed_tests import OwedTests
from deviceplugin.gpus.untested import Owed, UntestedGpus
from deviceplugin.pods.node_pods import NodePods
from deviceplugin.pods.usage_records import UsageRecord
from nvml.descriptors import gpu_open, opens
from nvml.withheld import addresses, read_withheld, write_withheld
from vgpu.api.codec import assignment_from_json
from vgpu.api.cordon import Cordon, condition, cordons_from_json
from vgpu.api.errors import BadDocument, Refused
from vgpu.api.grant import AssignedGpu
from vgpu.api.inventory import CORDON_REASONS, TESTING, CordonState, Gpu, GpuCondition, Inventory, Withdrawal
from vgpu.gputime.trial_verdict import TrialOutcome, TrialVerdict
from vgpu.health.conditions import Reason
from vgpu.health.cordons import CordonPlan, Opened, held_gpus, plan, recovered

CHECK_S: Final = 1.0
"""Between checks while a GPU is cordoned or tried: whether a process that is to let go of it has. Guessed."""
LOOK_S: Final = 5.0
"""For all processes of `OURS`. Guessed: descriptors are read in milliseconds."""
OURS: Final = frozenset({"tangram-copier", "tangram-trial"})
"""Programs that open GPUs: of the host pool, and of a trial."""

log = structlog.get_logger("deviceplugin.gpus.cordons")


class OpenedNvml(Protocol):
    """NVML as a supervisor keeps it open."""

    withheld: frozenset[str]
    """PCI addresses that its process does not open."""

    @property
    def on_bus(self) -> frozenset[str] | None:
        """PCI addresses of the machine's GPUs; None where they cannot be read."""

    @property
    def pid(self) -> int | None:
        """Of the process."""

    @property
    def abandoned_pids(self) -> tuple[int, ...]:
        """Of processes before it that could not be killed."""


@dataclass(frozen=True, slots=True)
class OpenedGpus:
    """Which of our processes have a GPU open: those that have NVML, by pid, and others by name."""

    driver: OpenedNvml
    proc_root: Path = Path("/proc")

    def of(self, gpus: Collection[Gpu]) -> Opened:
        """Of cordoned GPUs."""
        on_bus = addresses(self.driver.on_bus or ())
        stuck = frozenset(gpu.uuid for gpu in gpus if not gpu.pci or not addresses([gpu.pci]) <= on_bus)
        out = [gpu for gpu in gpus if gpu.uuid not in stuck and addresses([gpu.pci]) <= self.driver.withheld]
        if not out:
            return Opened(stuck=stuck)
        pid, abandoned = self.driver.pid, self.driver.abandoned_pids
        if any(gpu_open(one) is None for one in abandoned):  # it may be closing any: then its descriptors are gone
            return Opened(stuck=stuck)
        ours = [(one, self.proc_root) for one in _by_name(self.proc_root)]
        ours += [(one, Path("/proc")) for one in (*((pid,) if pid else ()), *abandoned)]
        return Opened(
            frozenset(gpu.uuid for gpu in out if not any(opens(one, gpu.minor, proc) for one, proc in ours)), stuck
        )


class CordonWatch:
    """Of one node. `gone`: pods that the API lacks and that are not known to be gone. `try_out` tries a GPU; None: GPUs are not tried. `tested` is called with
    its UUID and why it does not work. `before_offer`: to be awaited before a GPU that passed is offered. `untested`: where GPUs that are away are kept."""

    def __init__(
        self, offer: Offer, pods: NodePods, gone: Callable[[], Iterable[UsageRecord]], withheld: Path, opened: Callable[[Collection[Gpu]], Opened],
        try_out: Callable[[str], Awaitable[TrialVerdict]] | None, tested: Callable[[str, str], None],
        now: Callable[[], float] = time.time, before_offer: Callable[[str], Awaitable[None]] | None = None,
        untested: UntestedGpus | None = None, failed: Callable[[str], str] = lambda _: "", look_s: float = LOOK_S,
    ) -> None:  # fmt: skip
        self.withheld: frozenset[str] = frozenset()
        """UUIDs of GPUs that nothing of ours may have open."""
        self.withheld_by_others: Callable[[], frozenset[str]] = frozenset
        """UUIDs of GPUs that are closed for another reason. Whoever knows that its answer changed calls `check`."""
        self._offer, self._pods, self._gone, self._path, self._opened = offer, pods, gone, withheld, opened
        self._try_out, self._tested, self._now, self._before_offer = try_out, tested, now, before_offer
        self._cordons: Mapping[str, Cordon] = {}
        self._text: str | None = ""
        """As it was seen last; no node has an empty one that can be read."""
        self._known = False
        """Was the annotation read since the start?"""
        self._changed = asyncio.Event()
        self._tests: dict[str, asyncio.Task[None]] = {}
        self._owed, self._look_s = OwedTests(offer, untested, failed), look_s
        self._looking: asyncio.Future[Opened] | None = None
        """For processes that have GPUs open. A process can keep it from ending."""

    def load(self) -> Mapping[str, Owed]:
        """At the start: GPUs that are away and are to be tried when they come back."""
        owed = self._owed.load()
        self._offer.set_withdrawn(CORDONS, self._testing(owed) | dict(self._offer.withdrawn_by(CORDONS)))
        return owed

    def remember(self, earlier: Inventory) -> None:
        """As the node's annotation was when this program began: what was withdrawn is not offered before it was tried. What stands already stays."""
        self._owed.published(earlier)
        if not self._known:  # or it cannot be read
            self._cordons = {gpu.uuid: Cordon() for gpu in earlier.gpus if gpu.cordon not in ("", TESTING)}
            self._changed.set()
        stood = {gpu.uuid: one for gpu in earlier.gpus for one in gpu.withdrawn if one.reason in CORDON_REASONS}
        unhealthy = {gpu.uuid for gpu in earlier.gpus if gpu.state == "unhealthy"}
        self._offer.set_withdrawn(CORDONS, self._testing(unhealthy) | stood | dict(self._offer.withdrawn_by(CORDONS)))
        self._changed.set()

    def node_seen(self, text: str | None) -> None:
        """The node's annotation that names its cordoned GPUs; None: it has none."""
        if text == self._text:
            return
        self._text = text
        try:
            self._cordons = cordons_from_json(text)
        except BadDocument as error:
            log.error("the list of cordoned GPUs cannot be read: those of before stay cordoned", error=str(error))
            return
        self._known = True
        self._changed.set()

    def check(self) -> None:
        """`withheld_by_others` is another."""
        self._changed.set()

    async def run(self) -> None:
        """Until cancelled."""
        try:
            while True:
                version = self._offer.version
                self._changed.clear()
                try:
                    await self.once()
                except (OSError, Refused) as error:
                    log.error(
                        "which GPUs are left out, or to be tried, cannot be written", error=str(error), retry_s=CHECK_S
                    )
                await self._wait_for_change(version)
        finally:
            for test in self._tests.values():
                test.cancel()
            await asyncio.gather(*self._tests.values(), return_exceptions=True)

    async def before_published(self, inventory: Inventory) -> None:
        """The node's annotation is to have it: what it does not say of GPUs that are to be tried is on the disk first. Raises OSError, Refused."""
        await self._owed.before_published(inventory)

    def published(self, inventory: Inventory) -> None:
        """The node's annotation has it."""
        if self._owed.published(inventory):
            self._changed.set()

    async def once(self) -> None:
        """Bring the offer in step. Before the annotation and the pods are known, NVML leaves out what it left out before. Raises OSError, Refused."""
        self._offer.refresh()
        if not self._offer.probed:
            return
        inventory = self._offer.inventory()
        self.withheld = self._plan(inventory, Opened()).withheld | self.withheld_by_others()
        if self._known and (self._pods.synced or not self._cordons):  # until then nobody knows who has a cordoned GPU
            await asyncio.to_thread(self._write_withheld, inventory, frozenset(self._cordons))
        ordered = [gpu for gpu in inventory.gpus if gpu.uuid in self._cordons]
        opened = await self._look(ordered) if ordered else Opened()
        now = self._plan(self._offer.inventory(), opened)  # a GPU may have recovered or passed its self-test meanwhile
        self._offer.set_withdrawn(CORDONS, self._conditions(now.states))
        for uuid, state in now.states.items():
            if state == TESTING and uuid not in self._tests and self._works(uuid):
                self._tests[uuid] = asyncio.create_task(self._test(uuid))
        await self._owed.keep()

    async def _look(self, ordered: Collection[Gpu]) -> Opened:
        """Which GPUs our processes have open; none counts as closed where that is not seen in time: a process of a pod may have the name of one of ours, and a
        descriptor that nobody can look at without waiting."""
        if self._looking is not None and not self._looking.done():
            return Opened()
        self._looking = looking = _in_thread(self._opened, ordered)  # what a late one saw is out of date
        if not (await asyncio.wait([looking], timeout=self._look_s))[0]:
            log.warning("which processes have cordoned GPUs open is not seen in time: none is released meanwhile")
            return Opened()
        return looking.result()

    def _write_withheld(self, inventory: Inventory, cordoned: frozenset[str]) -> None:
        """What was left out stays so while a cordoned GPU is not in the inventory: NVML describes no GPU that it never opened. Raises OSError."""
        left_out = {gpu.pci for gpu in inventory.gpus if gpu.uuid in self.withheld and gpu.pci}
        if cordoned - {gpu.uuid for gpu in inventory.gpus}:
            left_out |= read_withheld(self._path) - addresses(gpu.pci for gpu in inventory.gpus)
        if write_withheld(self._path, left_out):
            log.info("GPUs that NVML leaves out", pci=sorted(left_out))

    def _plan(self, inventory: Inventory, opened: Opened) -> CordonPlan:
        try:
            held = held_gpus(inventory, self._held(inventory))
        except BadDocument:  # its pod may have any
            held = frozenset(gpu.uuid for gpu in inventory.gpus)
        withdrawn = self._offer.withdrawn_by(CORDONS)
        return plan(inventory, self._cordons, held, opened, known=self._pods.synced, withdrawn=withdrawn)

    def _held(self, inventory: Inventory) -> Iterator[AssignedGpu]:
        """Of pods, and of pods that left the API while their processes may run. Raises BadDocument where an assignment cannot be read."""
        for pod in self._pods.node_pods():
            yield from pod.assignment.held()
        for other in self._pods.unreadable():
            if (text := other.pod.metadata.annotation(self._offer.names.assignment)) is not None:
                yield from assignment_from_json(text).held()
        for record in self._gone():  # also before a check of the node's processes makes it an orphan
            yield from record.held
        for orphan in inventory.orphans:
            yield from orphan.held

    def _works(self, uuid: str) -> bool:
        """Does it answer, is nothing else wrong with it, and is it nobody else's? Else it is tried when that has ended."""
        reported, gpu = self._offer.reported.gpu(uuid), self._offer.inventory().gpu(uuid)
        wrong = [one for one in gpu.conditions if one.state != "degraded"] if gpu is not None else []
        expected = {Reason.SELF_TEST, *CORDON_REASONS}
        return reported is not None and reported.healthy and all(one.reason in expected for one in wrong)

    def hold_back(self, before: Inventory, after: Inventory) -> Mapping[str, GpuCondition]:
        """GPUs that were unhealthy and are not: they are tried before pods get them again."""
        return self._testing(recovered(before, after)) if self._try_out is not None else {}

    def _testing(self, uuids: Iterable[str]) -> dict[str, GpuCondition]:
        return dict.fromkeys(uuids, condition(TESTING, Cordon(since_s=int(self._now()))))

    def _conditions(self, states: Mapping[str, CordonState]) -> dict[str, GpuCondition]:
        """As the inventory says it. What stands keeps its time."""
        before, now = self._offer.withdrawn_by(CORDONS), condition(TESTING, Cordon(since_s=int(self._now())))
        found = {}
        for uuid, state in states.items():
            if state == TESTING:
                stood = before.get(uuid)
                found[uuid] = stood if stood is not None and stood.reason == Withdrawal.TESTING else now
            else:
                found[uuid] = condition(state, self._cordons[uuid])
        return found

    async def _test(self, uuid: str) -> None:
        try:
            verdict = await self._tried(uuid)
            why = why_unfit(verdict) if verdict is not None else ""
            (log.error if why else log.info)(
                "a GPU was tried", gpu_uuid=uuid, outcome=verdict and verdict.outcome, why=verdict and verdict.why
            )
            if uuid in self._cordons or self._offer.inventory().gpu(uuid) is None:  # again, or away, meanwhile
                return
            if verdict is None or verdict.outcome is not TrialOutcome.CANNOT_RUN:  # else a failure of before stands
                self._tested(uuid, why)
            if not why and self._before_offer is not None:
                await self._before_offer(uuid)
                if uuid in self._cordons:
                    return
            others = {one: reason for one, reason in self._offer.withdrawn_by(CORDONS).items() if one != uuid}
            self._offer.set_withdrawn(CORDONS, others)
        finally:
            self._tests.pop(uuid, None)
            self._changed.set()

    async def _tried(self, uuid: str) -> TrialVerdict | None:
        """Of a GPU in MIG mode, CUDA would try an instance, which a pod may have."""
        gpu = self._offer.reported.gpu(uuid)
        if self._try_out is not None and gpu is not None and gpu.mig:
            return TrialVerdict(TrialOutcome.CANNOT_RUN, "GPUs in MIG mode are not tried")
        return await self._try_out(uuid) if self._try_out is not None else None

    async def _wait_for_change(self, version: int) -> None:
        """At most `CHECK_S` while a GPU is cordoned or tried."""
        waiting: list[asyncio.Future[object]] = [
            asyncio.ensure_future(self._offer.changed_since(version)),
            asyncio.ensure_future(self._pods.changed()),
            asyncio.ensure_future(self._changed.wait()),
        ]
        withdrawn = any(gpu.cordon for gpu in self._offer.inventory().gpus) or bool(self._cordons)
        try:
            await asyncio.wait(waiting, timeout=CHECK_S if withdrawn else None, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for one in waiting:
                one.cancel()


def why_unfit(verdict: TrialVerdict) -> str:
    """Why pods must not have the GPU; empty where they may. That a driver does not suspend says nothing about the GPU, nor does a test that could not run."""
    if verdict.outcome in (TrialOutcome.FAULTY, TrialOutcome.HUNG):
        return f"the self-test failed: {verdict.why}"
    return ""


def _in_thread(look: Callable[[Collection[Gpu]], Opened], gpus: Collection[Gpu]) -> asyncio.Future[Opened]:
    """In a thread that nobody waits for at the end of the program: it may never end."""
    loop = asyncio.get_running_loop()
    found: asyncio.Future[Opened] = loop.create_future()

    def settle(opened: Opened | None, error: OSError | None) -> None:
        if error is not None:
            found.set_exception(error)
            found.exception()  # a late one is nobody's
        elif opened is not None:
            found.set_result(opened)

    def run() -> None:
        opened, error = None, None
        try:
            opened = look(gpus)
        except OSError as failed:
            error = failed
        with suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(settle, opened, error)

    Thread(target=run, name="cordons", daemon=True).start()
    return found


def _by_name(proc_root: Path) -> Collection[int]:
    """Processes of `OURS`."""
    found = []
    for folder in proc_root.iterdir():
        if folder.name.isdigit():
            try:
                name = (folder / "comm").read_text(errors="replace").strip()
            except OSError:  # it has ended
                continue
            if name in OURS:
                found.append(int(folder.name))
    return found

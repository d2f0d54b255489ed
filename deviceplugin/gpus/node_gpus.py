"""Follow the node's GPUs: which there are, and whether they are healthy. What is seen goes into the `Offer`.

A driver that does not answer is tried again and again, and the log records it: a node whose driver comes up late is served late, and a node
without GPUs idles. NVML runs in a child process (`nvml.supervisor`), which may hang or end at any time: every answer has a time limit, and
is waited for in threads.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Final, Literal, Protocol

import structlog

from deviceplugin.gpus.offer import Offer
from deviceplugin.metrics import Metrics
from nvml.errors import NvmlAway, NvmlError, NvmlHung
from nvml.inventory import probe
from nvml.messages import Found, HealthReply, OpenReply, XidsReply
from nvml.queries import Nvml
from vgpu.api.contract import NVIDIA_ENV
from vgpu.api.inventory import NORMAL, AccessMode, Gpu, Inventory
from vgpu.health.conditions import Reading
from vgpu.health.heat import NodeHeat
from vgpu.health.node_health import NodeHealth
from vgpu.health.presence import LateGpus, bus_address, missing, present

RETRY_S: Final = 1.0
"""Between attempts. They cost nothing: the supervisor decides when a child is started."""
OPEN_WAIT_S: Final = 1.0
"""How long one attempt waits for NVML to be opened: also how long an orderly end may take."""
EVENTS_S: Final = 0.5
"""Between queries for XID events. Guessed."""
GRACE_S: Final = 5.0
"""NVML may be away for so long before its GPUs are unhealthy: a child that was killed is back within a second. Guessed."""
HANGS: Final = 2
"""So many calls in a row that do not return, about whichever GPUs, and none of them is fit for use: the driver hangs. Guessed."""
DESCRIBE_RETRY_S: Final = 5.0
"""Before container runtimes are told again what NVML shows, where their folder cannot be written. Guessed."""
SILENT_ROUNDS: Final = 10
"""So often no GPU may answer before NVML is opened anew. Pulled out of the air: 50 s with the default setting."""

log = structlog.get_logger("deviceplugin.gpus.node_gpus")


def access_mode(wanted: Literal["auto", "cdi", "nvidia"], found: Found, environment: Mapping[str, str]) -> AccessMode:
    """`auto`: where NVIDIA's runtime serves our own container (the driver came with it, or the environment names it) it serves others."""
    if wanted != "auto":
        return wanted
    return "nvidia" if found == "loader" or NVIDIA_ENV in environment else "cdi"


class NvmlConnection(Protocol):
    """NVML as a supervisor keeps it open (`nvml.supervisor.NvmlSupervisor`)."""

    hangs: int
    """Calls about a GPU that did not return, since one did."""
    openings: int
    """So often NVML was opened."""
    withheld: frozenset[str]
    """PCI addresses of GPUs that are not open, as they are to be reset."""

    @property
    def on_bus(self) -> frozenset[str] | None:
        """PCI addresses of the machine's GPUs as NVML was opened; None where they cannot be read."""

    @property
    def nvml(self) -> Nvml: ...

    @property
    def closed(self) -> bool: ...

    def await_open(self, wait_s: float) -> OpenReply:
        """Raises NvmlAway."""

    def reopen(self, why: str) -> None:
        """Replace the process that has NVML open."""


class NodeGpus:
    """Keeps an offer in step with NVML."""

    def __init__(
        self, offer: Offer, metrics: Metrics, driver: NvmlConnection, *, access: Literal["auto", "cdi", "nvidia"],
        unit_mib: int, health_s: float, probe_s: float, on_inventory: Callable[[Inventory], Awaitable[None]],
        try_out: Callable[[Inventory], Awaitable[None]], prepare: Callable[[Inventory], Awaitable[None]] | None = None, clock: Callable[[], float] = time.monotonic,
        now: Callable[[], float] = time.time,
    ) -> None:  # fmt: skip
        self._offer, self._metrics, self._on_inventory = offer, metrics, on_inventory
        self._try_out, self._prepare, self._clock, self._now = try_out, prepare, clock, now
        self._driver, self.nvml = driver, driver.nvml
        self._wanted, self._unit_mib = access, unit_mib
        self._health_s, self._probe_s = health_s, probe_s
        self.health = NodeHealth()
        self.heat = NodeHeat()
        self._away = ""
        self._away_since_s = 0.0
        self._openings = 0
        """Of NVML, at the last probe."""
        self._undescribed = ""
        """Why container runtimes cannot be told which GPUs NVML shows; empty: they were."""
        self._late = LateGpus()
        self._hung: dict[str, str] = {}
        """UUID -> why, of GPUs of which a call did not return."""
        self._earlier: tuple[Gpu, ...] = ()
        self._due = False
        """Is a probe due, whatever the time?"""

    @property
    def failing(self) -> str:
        """Why NVML cannot be used, or not for some GPU; empty when it can."""
        return self._away or next(iter(self._hung.values()), "")

    def last_health(self, uuid: str) -> HealthReply:
        """What the last health query showed, with the heat class as it is offered. For any thread."""
        reading = self.health.readings.get(uuid)
        trouble = None if reading is not None else f"GPU {uuid} has not answered the last health query"
        return HealthReply(trouble, reading, heat=self.heat.classes.get(uuid, NORMAL))

    def remember(self, earlier: Inventory) -> None:
        """As the node's annotation was when this program began: since when conditions stand, and GPUs that are not opened now."""
        self.health.remember(earlier.gpus)
        self._earlier = earlier.gpus
        if self._offer.probed:  # the API server answered late
            now = self._with_closed(self._offer.reported, self._driver.withheld, self._driver.on_bus)
            self._offer.set_inventory(now, self.health.conditions)
            self._report()

    def probe_soon(self) -> None:
        """MIG instances were made or removed: which GPUs and instances there are is checked within a second."""
        self._due = True

    def self_tested(self, uuid: str, why: str) -> None:
        """A GPU was tried. `why` it does not work; empty: it does."""
        if self.health.tested(uuid, why, self._now()):
            self._reported()

    async def run(self) -> None:
        """Until cancelled, or until the driver is closed."""
        while True:
            try:
                opened = await asyncio.to_thread(self._driver.await_open, OPEN_WAIT_S)
                await self._follow(access_mode(self._wanted, opened.found, os.environ), opened)
            except (NvmlError, OSError) as error:
                # the plugin ends: a TaskGroup loses a cancellation that comes beside an error (Python before 3.13)
                if self._driver.closed:
                    return
                self._fails(error)
                await asyncio.sleep(RETRY_S)

    def _fails(self, error: Exception) -> None:
        """The GPUs are unmonitored once NVML has been unavailable for long, or a call did not return."""
        why, at_s = str(error), self._clock()
        if not self._away:
            self._away_since_s = at_s
        if why != self._away:
            log.warning("no GPUs are offered yet, or their state is no longer known", error=why)
        self._away = why
        hangs = isinstance(error, NvmlHung) or self._driver.hangs >= HANGS
        long = hangs or at_s - self._away_since_s >= GRACE_S
        uuids = [gpu.uuid for gpu in self._offer.inventory().gpus]
        if long and self._offer.probed and self.health.away(uuids, why, self._now()):
            self._reported()
        self._report_heat()

    async def _follow(self, access: AccessMode, opened: OpenReply) -> None:
        while True:
            before = self._offer.reported if self._offer.probed else None
            self._due = False
            openings, on_bus, withheld = self._driver.openings, self._driver.on_bus, self._driver.withheld
            inventory = await asyncio.to_thread(
                probe, self.nvml, unit_mib=self._unit_mib, access=access, last=before or self._closed_before(withheld),
                reopened=openings != self._openings, on_bus=on_bus, withheld=withheld,
            )  # fmt: skip
            described = [gpu for gpu in inventory.gpus if gpu.healthy]
            self._late.probed(missing(described, on_bus) - withheld, self._clock())
            if await self._describe(inventory, known=before is not None):
                self._openings = openings
                await self._try_out(inventory)  # before any share is granted
            inventory = before if self._undescribed and before is not None else inventory
            if before is None:  # these may have become known since the probe
                inventory = self._with_closed(inventory, withheld, on_bus)
            self.health.back()
            for kept in (self.health, self.heat):
                kept.keep_only([gpu.uuid for gpu in inventory.gpus])
            self._offer.set_inventory(inventory, self.health.conditions)
            self._report()
            if self._away or before is None:
                log.info("NVML answers", library=opened.found, access=access, was=self._away)
            self._away = ""
            if not inventory.gpus:
                log.info("this node has no GPUs", next_probe_s=self._probe_s)
            open_ = [gpu.uuid for gpu in inventory.gpus if bus_address(gpu.pci) not in withheld]
            await self._watch(open_, DESCRIBE_RETRY_S if self._undescribed else self._probe_s)

    async def _describe(self, inventory: Inventory, *, known: bool) -> bool:
        """Container runtimes can find these devices. False where that is not written: the GPUs that are `known` stay as they are. Raises OSError where none is."""
        try:
            if self._prepare is not None:
                await self._prepare(inventory)
            await self._on_inventory(inventory)
        except OSError as error:
            if not known:
                raise
            if not self._undescribed:
                log.error("GPUs are offered as before: container runtimes cannot be told of others", error=str(error))
            self._undescribed = str(error)
        else:
            self._undescribed = ""
        return not self._undescribed

    def _closed_before(self, withheld: frozenset[str]) -> Inventory | None:
        """GPUs that the program before this one had, and that NVML does not describe as it does not open them."""
        gpus = tuple(gpu for gpu in self._earlier if bus_address(gpu.pci) in withheld)
        return Inventory(gpus, self._unit_mib) if gpus else None

    def _with_closed(self, inventory: Inventory, withheld: frozenset[str], on_bus: frozenset[str] | None) -> Inventory:
        closed = self._closed_before(withheld)
        if closed is None:
            return inventory
        return replace(
            inventory, gpus=present(closed.gpus, inventory.gpus, silent=0, reopened=True, on_bus=on_bus).gpus
        )

    async def _watch(self, uuids: list[str], for_s: float) -> None:
        """Watch XID events and query the health of the GPUs for so long. Raises NvmlError when NVML as such does not answer."""
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(for_s) as probing, asyncio.TaskGroup() as group:
                    group.create_task(self._watch_xids(tuple(uuids)))
                    group.create_task(self._query_health(uuids, probing))
                    group.create_task(self._watch_openings(probing))
        except ExceptionGroup as failed:  # no `except*`: what that raises, Python before 3.11.4 puts into a group again
            if failed.split(NvmlError)[1] is not None:
                raise  # a bug of this program must not pass for a driver that is unavailable
            raise failed.exceptions[0] from None

    async def _watch_openings(self, probing: asyncio.Timeout) -> None:
        """End `probing` when NVML was opened anew: it may list other GPUs."""
        while True:
            await asyncio.sleep(EVENTS_S)
            if why := self._late.reopen(self._clock()):
                self._driver.reopen(why)
            if (self._due or self._driver.openings != self._openings) and not probing.expired():
                probing.reschedule(asyncio.get_running_loop().time())

    async def _watch_xids(self, uuids: tuple[str, ...]) -> None:
        reported: set[str] = set()
        while uuids:
            pending = asyncio.ensure_future(asyncio.to_thread(self.nvml.xids, uuids))
            try:
                seen = await asyncio.shield(pending)
            except asyncio.CancelledError:
                with suppress(NvmlError):
                    self._take(await pending, reported)  # NVML reports each once
                raise
            self._take(seen, reported)
            await asyncio.sleep(EVENTS_S)

    def _take(self, seen: XidsReply, reported: set[str]) -> None:
        for uuid, why in seen.unwatched.items():
            if uuid not in reported:
                reported.add(uuid)
                log.info("a GPU reports no XID events: only its health queries count", error=why)
        for event in seen.xids:
            log.warning("XID", gpu_uuid=event.uuid, xid=event.xid)
            self._metrics.xids.labels(event.uuid, str(event.xid)).inc()
            if self.health.xid(event.uuid, event.xid, self._now()):
                self._reported()

    async def _query_health(self, uuids: list[str], probing: asyncio.Timeout) -> None:
        """Raises NvmlError when no GPU answers for long: a driver that was reloaded has no old session.

        `probing` ends when the next probe is due: at once for a GPU that answers again, and that the last probe left unhealthy.
        """
        if not uuids:
            await asyncio.Event().wait()
        silent_rounds = 0
        while silent_rounds < SILENT_ROUNDS:
            troubles = [await self._trouble_of(uuid) for uuid in uuids]
            silent_rounds = 0 if None in troubles else silent_rounds + 1
            self._report_heat()
            await asyncio.sleep(self._health_s)
            if self._left_unhealthy(uuids, troubles) and not probing.expired():
                probing.reschedule(asyncio.get_running_loop().time())
        self._driver.reopen(f"no GPU answers: {troubles[0]}")
        raise NvmlAway(f"no GPU answers: {troubles[0]}")

    def _left_unhealthy(self, uuids: list[str], troubles: list[str | None]) -> bool:
        """Is there a GPU that is healthy, and did not answer the last probe?"""
        answering = {uuid for uuid, trouble in zip(uuids, troubles, strict=True) if trouble is None}
        well = {uuid for uuid in answering if not self.health.stands(uuid)}
        return any(gpu.uuid in well and not gpu.healthy for gpu in self._offer.reported.gpus)

    async def _trouble_of(self, uuid: str) -> str | None:
        """Why the GPU does not answer, if it does not; a change of its health is reported. Raises NvmlAway."""
        try:
            reply = await asyncio.to_thread(self.nvml.health, uuid)
        except NvmlHung as error:
            self._hung[uuid] = str(error)
            if self.health.failed(uuid, str(error), self._now(), hung=True):
                self._reported()
            return str(error)
        self._hung.pop(uuid, None)
        if reply.trouble is not None:
            changed = self.health.failed(uuid, reply.trouble, self._now(), code=reply.code)
        else:
            reading = reply.reading or Reading()
            changed = self.health.answered(uuid, reading, self._now())
            self.heat.read(uuid, reading, self._clock())
        if changed:
            self._reported()
        return reply.trouble

    def _report_heat(self) -> None:
        """Heat classes are no change of health: kubelet and Events do not get them."""
        if self.heat.changed(self._clock()):
            log.info("heat classes changed", classes=self.heat.classes)
            self._offer.set_heat(self.heat.classes)

    def _reported(self) -> None:
        conditions = self.health.conditions
        log.warning("health changed", conditions={uuid: [one.reason for one in of] for uuid, of in conditions.items()})
        self._offer.set_conditions(conditions)
        self._report()

    def _report(self) -> None:
        self._metrics.healthy.clear()
        for gpu in self._offer.inventory().gpus:
            self._metrics.healthy.labels(gpu.uuid, str(gpu.index)).set(gpu.healthy)

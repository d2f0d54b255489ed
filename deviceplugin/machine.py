"""Follow the machine's GPUs: which there are, and whether they are well. What is seen goes into the `Offer`.

A driver that does not answer is asked again and again, and said so: a node whose driver comes up late is served late, and a node
without GPUs idles. NVML blocks, so it is called in threads.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final, Literal

import structlog

from deviceplugin.metrics import Metrics
from deviceplugin.offer import Offer
from nvml.errors import NvmlError
from nvml.health import Events, Health
from nvml.library import Found
from nvml.probe import answers, probe
from nvml.session import opened
from vgpu.contract import NVIDIA_ENV
from vgpu.inventory import AccessMode, Inventory

RETRY_S: Final = (1.0, 60.0)
EVENT_WAIT_MS: Final = 500
"""How long one wait for XID events blocks its thread: also how long an orderly end may take."""

REOPEN_ROUNDS: Final = 10
"""So often no card may answer before NVML is closed and opened again. Pulled out of the air: 50 s with the default setting."""

log = structlog.get_logger("deviceplugin.machine")


def access_mode(wanted: Literal["auto", "cdi", "nvidia"], found: Found, environment: Mapping[str, str]) -> AccessMode:
    """`auto`: where NVIDIA's runtime serves our own container (the driver came with it, or we were told to ask) it serves others."""
    if wanted != "auto":
        return wanted
    return "nvidia" if found == "loader" or NVIDIA_ENV in environment else "cdi"


class Machine:
    """Keeps an offer in step with NVML."""

    def __init__(
        self, offer: Offer, metrics: Metrics, *, driver_root: Path, access: Literal["auto", "cdi", "nvidia"],
        unit_mib: int, health_s: float, probe_s: float, on_inventory: Callable[[Inventory], None],
        try_out: Callable[[Inventory], Awaitable[None]],
    ) -> None:  # fmt: skip
        self.failing = ""
        """Why NVML cannot be used; empty when it can."""
        self._offer, self._metrics, self._on_inventory = offer, metrics, on_inventory
        self._try_out = try_out
        self._driver_root, self._wanted, self._unit_mib = driver_root, access, unit_mib
        self._health_s, self._probe_s = health_s, probe_s
        self._health = Health()

    async def run(self) -> None:
        """Until cancelled."""
        wait_s = RETRY_S[0]
        while True:
            try:
                with opened(self._driver_root) as found:
                    access = access_mode(self._wanted, found, os.environ)
                    log.info("NVML answers", library=found, access=access)
                    await self._follow(access)
            except (NvmlError, OSError) as error:
                if not self.failing:
                    wait_s = RETRY_S[0]
                elif self._offer.probed:  # for the second time in a row: nobody can use these cards now
                    self._offer.set_ill({card.uuid: str(error) for card in self._offer.inventory().cards})
                    self._tell()
                self.failing = str(error)
                log.warning(
                    "no GPUs are offered yet, or their state is not known any longer",
                    error=self.failing,
                    retry_s=wait_s,
                )
                await asyncio.sleep(wait_s)
                wait_s = min(2 * wait_s, RETRY_S[1])

    async def _follow(self, access: AccessMode) -> None:
        while True:
            before = self._offer.inventory() if self._offer.probed else None
            inventory = await asyncio.to_thread(probe, unit_mib=self._unit_mib, access=access, last=before)
            self._on_inventory(inventory)
            await self._try_out(inventory)  # before anybody is given a share
            self._offer.set_inventory(inventory)
            self._offer.set_ill(self._health.ill)
            self._tell()
            if self.failing:
                log.info("NVML answers again")
            self.failing = ""
            if not inventory.cards:
                log.info("this node has no GPUs: idling", look_again_s=self._probe_s)
                await asyncio.sleep(self._probe_s)
                continue
            await self._watch([card.uuid for card in inventory.cards])

    async def _watch(self, uuids: list[str]) -> None:
        """Listen and ask for `probe_s`. Raises NvmlError when listening as such fails."""
        events = await asyncio.to_thread(Events, uuids)
        for why in events.deaf.values():
            log.info("no XID events of a card: it is asked only", error=why)
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(self._probe_s), asyncio.TaskGroup() as group:
                    group.create_task(self._listen(events))
                    group.create_task(self._ask(uuids))
        except ExceptionGroup as failed:  # no `except*`: what that raises, Python before 3.11.4 puts into a group again
            if failed.split(NvmlError)[1] is not None:
                raise  # a mistake of ours is not to be taken for a driver that is away
            raise failed.exceptions[0] from None
        finally:
            await asyncio.to_thread(events.close)

    async def _listen(self, events: Events) -> None:
        while True:
            waiting = asyncio.ensure_future(asyncio.to_thread(events.wait, EVENT_WAIT_MS))
            try:
                event = await asyncio.shield(waiting)
            except asyncio.CancelledError:
                with suppress(NvmlError):
                    await waiting  # the set may be freed only when nobody waits on it
                raise
            if event is None:
                continue
            log.warning("XID", gpu_uuid=event.uuid, xid=event.xid)
            self._metrics.xids.labels(event.uuid, str(event.xid)).inc()
            if self._health.xid(event.uuid, event.xid):
                self._told()

    async def _ask(self, uuids: list[str]) -> None:
        """Raises NvmlError when no card answers for long: a driver that was reloaded knows nothing of an old session."""
        silent_rounds = 0
        while silent_rounds < REOPEN_ROUNDS:
            troubles = [await asyncio.to_thread(answers, uuid) for uuid in uuids]
            changed = [self._health.answered(uuid, trouble) for uuid, trouble in zip(uuids, troubles, strict=True)]
            if any(changed):
                self._told()
            silent_rounds = 0 if None in troubles else silent_rounds + 1
            await asyncio.sleep(self._health_s)
        raise NvmlError(f"no card answers: {troubles[0]}")

    def _told(self) -> None:
        log.warning("health changed", ill=dict(self._health.ill))
        self._offer.set_ill(self._health.ill)
        self._tell()

    def _tell(self) -> None:
        self._metrics.healthy.clear()
        for card in self._offer.inventory().cards:
            self._metrics.healthy.labels(card.uuid, str(card.index)).set(card.healthy)

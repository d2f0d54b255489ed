"""Switch MIG mode of one GPU of a declared configuration: after it was idle for long, and after every process of Tangram has closed it.

    idle      nobody has had the GPU for `idle_s`; it is withdrawn
    closing   NVML leaves it out (`nvml.withheld`), as when a cordoned GPU is released, until no process of Tangram has it open
    switched  by an NVML process of its own, which then ends; the GPU is opened again

If the plugin is killed in between, the next one opens the GPU again and begins anew. A GPU whose mode would change only with a reset keeps its mode.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Final

import structlog

from nvml.errors import NvmlError
from nvml.mig_changes import NotCarriedOut, carry_out, table_of
from nvml.supervisor import TimeLimits, supervised
from vgpu.api.inventory import Gpu, Inventory
from vgpu.health.cordons import Opened
from vgpu.mig.plan import GpuPlan

CLOSE_S: Final = 60.0
"""For our own processes to close the GPU. Guessed: NVML is started anew within 20 s, and a copier ends within some."""
CALL_S: Final = 60.0
"""A change of the mode resets the GPU. Guessed, as for `tangramctl mig apply`."""

log = structlog.get_logger("deviceplugin.mig.mode_switch")


def switch_by_nvml(driver_root: Path, plan: GpuPlan) -> None:
    """Carry the plan out in an NVML process of its own. Raises NvmlError, NotCarriedOut."""
    with supervised(driver_root, TimeLimits(call_s=CALL_S)) as nvml:
        carry_out([plan], nvml, lambda uuid: table_of(nvml.mig(uuid)))


class ModeSwitch:
    """Of one node, one GPU at a time. `idle_s` 0: never. `opened`: which GPUs our processes have open; `changed` is called when `withheld` is another;
    `switch` raises NvmlError, NotCarriedOut."""

    def __init__(
        self, idle_s: float, *, opened: Callable[[Collection[Gpu]], Opened], switch: Callable[[GpuPlan], None], changed: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        self.withheld: frozenset[str] = frozenset()
        """UUIDs of GPUs that NVML is to leave out."""
        self.changed = changed
        self._idle_s, self._opened, self._switch, self._clock = idle_s, opened, switch, clock
        self._idle_since_s: dict[str, float] = {}
        self._going: tuple[GpuPlan, float] | None = None

    @property
    def never(self) -> bool:
        """Is no mode switched on this node?"""
        return self._idle_s <= 0

    @property
    def going(self) -> bool:
        """Is a GPU being closed or switched?"""
        return self._going is not None

    def idle(self, uuid: str) -> None:
        """Nobody has it now."""
        self._idle_since_s.setdefault(uuid, self._clock())

    def keep_only(self, uuids: Collection[str]) -> None:
        """The others are in use, or need no other mode."""
        self._idle_since_s = {uuid: since for uuid, since in self._idle_since_s.items() if uuid in uuids}

    def due(self, uuid: str) -> bool:
        """Was it idle for long?"""
        since_s = self._idle_since_s.get(uuid)
        return not self.never and since_s is not None and self._clock() - since_s >= self._idle_s

    def begin(self, plan: GpuPlan) -> None:
        """The GPU is withdrawn and idle: have it closed."""
        self._going = plan, self._clock()
        self._withhold({plan.uuid})

    def forget(self) -> None:
        """Begin nothing more, and open again what was closed."""
        self._going, self._idle_since_s = None, {}
        self._withhold(())

    async def follow(self, inventory: Inventory) -> tuple[GpuPlan | None, str]:
        """The plan, once it has ended, and why it was not carried out; None while it goes on."""
        if self._going is None:
            return None, ""
        plan, since_s = self._going
        gpu = inventory.gpu(plan.uuid)
        if gpu is None:
            return self._end(plan, "the GPU is gone")
        opened = await asyncio.to_thread(self._opened, [gpu])
        if plan.uuid in opened.stuck:
            return self._end(plan, "NVML cannot leave it out: the node does not show its PCI address")
        if plan.uuid not in opened.closed:
            late = self._clock() - since_s >= CLOSE_S
            return self._end(plan, f"Tangram's processes did not close it within {CLOSE_S:g} s") if late else (None, "")
        try:
            await asyncio.to_thread(self._switch, plan)
        except (NvmlError, NotCarriedOut) as error:
            return self._end(plan, str(error))
        return self._end(plan, "")

    def _end(self, plan: GpuPlan, why: str) -> tuple[GpuPlan, str]:
        self.forget()
        return plan, why

    def _withhold(self, uuids: Collection[str]) -> None:
        if self.withheld != frozenset(uuids):
            self.withheld = frozenset(uuids)
            self.changed()

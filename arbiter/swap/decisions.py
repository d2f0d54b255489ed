"""What the policy of a node decides, carried out by its containers, in rounds: each may report what leads to the next decision. Nothing here waits."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Final

import structlog

from arbiter.swap.container import SwapContainer
from arbiter.swap.coordinator import Coordinator
from arbiter.swap.gpu_reports import GpuReports
from arbiter.swap.host_pools import HostPools
from arbiter.swap.pauses import SwapCounts
from arbiter.swap.reasons import SwapReasons
from vgpu.memory.swap.actions import Action, CancelSwapOut, Grant, Report, SwapIn, SwapOut

ROUNDS: Final = 8
"""Of decisions and what follows from them in one turn, so that a turn takes some milliseconds at most; the next turn goes on."""
_log = structlog.get_logger()


class Decisions:
    """See the module. `containers` by name are the node's own."""

    def __init__(
        self, clock: Callable[[], float], containers: Mapping[str, SwapContainer], coordinator: Coordinator, reports: GpuReports, pools: HostPools,
        reasons: SwapReasons, counts: SwapCounts,
    ) -> None:  # fmt: skip
        self.active: set[str] = set()
        """Containers whose turn is due."""
        self.again = False
        """Did the rounds of the last turn not suffice?"""
        self._clock, self._containers, self._coordinator = clock, containers, coordinator
        self._reports, self._pools, self._reasons, self._counts = reports, pools, reasons, counts

    @property
    def busy(self) -> bool:
        """Whether anything waits or moves: only then use and work change a decision."""
        return bool(self._coordinator.requests) or any(self._containers[name].blocked for name in self.active)

    def settle(self) -> None:
        """Decide, and let the active containers go on, until nothing follows from it any more."""
        for _ in range(ROUNDS):
            self.decide()
            for name in list(self.active):
                if (container := self._containers.get(name)) is not None:
                    container.turn(partial(self._coordinator.room_bytes, name))
                    self._reasons.note_loss(container)
            for event in self._reports.changed(self._containers.values(), self._clock()):
                self._coordinator.apply(event)
            if not self._coordinator.due(self._clock()):
                break
        self.again = self._coordinator.due(self._clock())
        self._pools.turn()
        self.active = {name for name in self.active if name in self._containers and not self._containers[name].quiet}

    def decide(self) -> None:
        """Decide, if that is due."""
        for _ in range(ROUNDS):
            now_s = self._clock()
            if not self._coordinator.due(now_s):
                return
            for action in self._coordinator.decide(now_s):
                self._carry_out(action)

    def _carry_out(self, action: Action) -> None:
        if isinstance(action, Grant):
            request = self._coordinator.granted(action)
            self._containers[request.name].granted(request.gpu, request.bytes, elastic=request.elastic)
            return
        container = self._containers.get(getattr(action, "name", ""))
        if container is None:
            return
        match action:
            case SwapOut(gpus=gpus):
                _log.info("swap out", grant=container.name, bytes=gpus)
                self._counts.swaps[container.name, "out"] += 1
                container.swap_out(gpus)
            case CancelSwapOut():
                container.cancel()
            case SwapIn():
                _log.info("swap in", grant=container.name)
                self._counts.swaps[container.name, "in"] += 1
                container.swap_in()
            case Report(reason=reason) if reason.startswith("it did not give way"):
                container.did_not_give_way(reason)

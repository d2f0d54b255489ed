"""What an operator sees of a container that swaps: why it is paused, over its limit, stranded, or unable to swap.

The policy decides about time-outs (`vgpu.memory.swap.timeouts`) and gives each reason once. This module stores the reasons for as long as they
apply. `arbiter.node_swapping` acts on them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from arbiter.swap.container import SwapContainer
from arbiter.swap.coordinator import Coordinator
from arbiter.swap.orders import OutOrder
from arbiter.swap.pauses import Pauses
from arbiter.swap.results import GpuSwapStatus, Notice, SwapStatus
from vgpu.memory.swap.actions import OverLimit, Stranded

WAITS_FOR_TURN = "waits for its turn"
NO_WORK = "comes back when it has work"
NO_POOL = "waits for the host pool"


@dataclass(frozen=True, slots=True)
class EndActions:
    """From the settings: what follows."""

    over_limit: Literal["kill", "report"] = "kill"
    stranded: Literal["evict", "keep"] = "evict"


class SwapReasons:
    """Reasons, by container."""

    def __init__(self, actions: EndActions, coordinator: Coordinator) -> None:
        self.actions = actions
        self._coordinator = coordinator
        self._reasons: dict[tuple[type[Notice], str], str] = {}
        self._lost: set[str] = set()
        """Containers whose loss of memory was reported."""

    def note(self, notices: Iterable[Notice]) -> None:
        """Store what was just decided."""
        for notice in notices:
            self._reasons[type(notice), notice.name] = notice.reason

    def forget(self, name: str) -> None:
        """The container is gone."""
        self._lost.discard(name)
        self._reasons = {key: reason for key, reason in self._reasons.items() if key[1] != name}

    def note_loss(self, container: SwapContainer) -> None:
        """Report once that its memory is lost."""
        if not container.lost:
            self._lost.discard(container.name)
        elif container.name not in self._lost:
            self._lost.add(container.name)
            self._coordinator.notice(Stranded(container.name, container.lost))

    def over_limit(self, name: str) -> str:
        """Why it is over its limit: it did not give way. Empty: it is not."""
        return self._reasons.get((OverLimit, name), "") if self._coordinator.policy.is_over_limit(name) else ""

    def stranded(self, container: SwapContainer) -> str:
        """Why its memory cannot come back. Empty: it can."""
        if container.lost:
            return container.lost
        name = container.name
        return self._reasons.get((Stranded, name), "") if self._coordinator.policy.is_stranded(name) else ""

    def status(self, container: SwapContainer, pauses: Pauses, *, pools_ready: bool) -> SwapStatus:
        """Of a container that has joined. `pools_ready`: of all its GPUs from which memory is away."""
        name, gpus = container.name, container.contract.gpus if container.contract is not None else {}
        order = container.order
        direction: Literal["out", "in"] | None = None
        if order is not None:
            direction = "out" if isinstance(order, OutOrder) else "in"
        stranded = self.stranded(container)
        pool_wait = self._coordinator.policy.pool_waits.get(name)
        return SwapStatus(
            paused=container.blocked,
            gpus=tuple(
                GpuSwapStatus(gpu, container.away_bytes(gpu), *sizes, *container.figures(gpu)[:2])
                for gpu, sizes in gpus.items()
            ),
            direction=direction,
            unable=container.ability.unable,
            waiting=sum(one.name == name for one in self._coordinator.requests.values()),
            paused_s=pauses.present_s(name),
            why=self._why(name, direction, stranded, pools_ready=pools_ready) if container.blocked else "",
            over_limit=self.over_limit(name),
            stranded=stranded,
            pool_full=pool_wait.text if pool_wait is not None else "",
        )

    def _why(self, name: str, direction: str | None, stranded: str, *, pools_ready: bool) -> str:
        """Why it is paused."""
        if direction is not None:
            return "moves to host memory" if direction == "out" else "comes back"
        if stranded:
            return stranded
        if not pools_ready:
            return NO_POOL
        return WAITS_FOR_TURN if self._coordinator.policy.wants(name) else NO_WORK

"""All of swapping on one node, in the arbiter's one loop thread: what the policy decides is carried out, and what happens is reported to it.

Nothing here waits. A turn reads what is there, decides, and sends what can be sent; what is left is due at `deadline_s`, or when `fd` is readable. Only `wake`,
`working` and `announced` may be called from other threads.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from math import inf
from pathlib import Path
from typing import Final

from arbiter.connection import Connection
from arbiter.host import image_of, lives_since
from arbiter.swap.activity import ActivityChanges
from arbiter.swap.container import SwapContainer
from arbiter.swap.container_host import Blocking
from arbiter.swap.coordinator import Coordinator, WaitingRequest
from arbiter.swap.copier import Copier
from arbiter.swap.decisions import Decisions
from arbiter.swap.free_memory import FreeMemory
from arbiter.swap.gpu_reports import GpuReports
from arbiter.swap.host_pool import HostPool
from arbiter.swap.host_pools import HostPools
from arbiter.swap.pauses import Pauses, SwapCounts
from arbiter.swap.poller import Poller
from arbiter.swap.readers import ContainerReaders
from arbiter.swap.ready_gpus import ReadyGpus
from arbiter.swap.reasons import EndActions, SwapReasons
from arbiter.swap.records_file import gpus_with_records
from arbiter.swap.results import Decided, GpuSwapFacts, Notice, Stated, SwapStatus
from vgpu.memory.ceiling import Ceiling, ceiling
from vgpu.memory.records import NodeAnswer
from vgpu.memory.swap.events import (
    WAIT_MOST_S,
    Changed,
    ContainerEvent,
    Event,
    GpuSeen,
    Joined,
    Left,
    MemoryContract,
    Requested,
    Used,
    Withdrawn,
    Working,
)
from vgpu.memory.swap.settings import SwapSettings

UNKNOWN_BYTES: Final = 2**50
"""Capacity of a GPU before the first reading: a PiB, which no GPU has, so nothing is moved."""


class SwapNode:
    """See the module. `copiers`: folder with <GPU UUID>.sock. `records`: folder of the records. `recall(name, gpu, bytes)` requests unused
    leases, and `owes(name, gpu)` says whether a process has yet to answer."""

    def __init__(
        self,
        clock: Callable[[], float],
        blocks: Blocking,
        settings: SwapSettings,
        copiers: Path,
        records: Path,
        boot_id: str,
        recall: Callable[[str, str, int], None],
        trace: Path | None = None,
        *,
        owes: Callable[[str, str], bool] = lambda *_: True,
        started_at: Callable[[int], int] = lives_since,
        image_of: Callable[[int], int] = image_of,
        connect: Callable[[Path], Copier] = Copier,
        actions: EndActions | None = None,
    ) -> None:
        self.clock, self.recall, self.owes = clock, recall, owes
        self.started_at, self.image_of = started_at, image_of
        self.blocks, self.counts = Pauses(blocks, clock), SwapCounts()
        self.poller = Poller()
        self._coordinator = Coordinator(settings, trace, self._state)
        self.reasons = SwapReasons(actions if actions is not None else EndActions(), self._coordinator)
        self._pools = HostPools(copiers, records, boot_id, self.poller, clock, connect)
        self._reports = GpuReports(self._pools)
        self._containers: dict[str, SwapContainer] = {}
        self._free = FreeMemory(self._reports.capacity_bytes, self._containers, self._coordinator)
        self._decisions = Decisions(
            clock, self._containers, self._coordinator, self._reports, self._pools, self.reasons, self.counts
        )
        self._readers = ContainerReaders(self.poller, clock)
        self._ready = ReadyGpus(self._pools, self._reports.capacity_bytes, clock)
        self._stated: dict[tuple[str, int, str], int] = {}
        self._activity = ActivityChanges(clock, self.wake)
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self.poller.add(self._wake_fd, self._woken)
        for gpu in gpus_with_records(records):
            self._adopt(gpu)

    @property
    def fd(self) -> int:
        """Readable when a turn is due."""
        return self.poller.fd

    def turn(self) -> None:
        """Read what is ready, decide, carry out. Never waits."""
        self._readers.turn()
        self.poller.turn()
        now_s = self.clock()
        for event in self._activity.take(now_s, everything=self._decisions.busy):
            self._coordinator.apply(event, decides=self._decisions.busy)
        self._pools.turn(now_s)
        self._decisions.settle()
        self._ready.turn()
        self._coordinator.trace.write(now_s)

    def deadline_s(self) -> float | None:
        """When a turn is due although `fd` is not readable; None: never."""
        times = [self._pools.deadline_s(), *(self._containers[name].deadline_s() for name in self._decisions.active)]
        times += [self._coordinator.policy.deadline_s() or inf, self._coordinator.trace.deadline_s() or inf]
        times += [
            self._activity.deadline_s(busy=self._decisions.busy),
            self._ready.deadline_s(),
            self._readers.deadline_s(),
        ]
        if self._decisions.again or self._coordinator.undecided:
            times.append(self.clock())
        at_s = min(times)
        return None if at_s == inf else at_s

    def wake(self) -> None:
        """A turn is due. From any thread."""
        try:
            os.eventfd_write(self._wake_fd, 1)
        except (BlockingIOError, OSError):
            return  # it is due already, or this is closed

    def add_gpu(self, gpu: str, usable_bytes: int, others_bytes: int = 0) -> None:
        """A GPU has so much for containers, but for what others use; again: these changed. The copier's context is kept free while there is no copier.
        It is what is there, and no promise: a node offers NVML's total less `burst.contextMiB` (docs/development/swapping.md has all figures)."""
        self._coordinator.apply(self._reports.gpu(gpu, usable_bytes, others_bytes, self.clock()))

    def join(self, name: str, contract: MemoryContract, gpus: Sequence[str]) -> None:
        """A container has a grant. `gpus`: in the order of the wire. One whose capacity is not known yet counts as large enough."""
        for gpu in gpus:
            if gpu not in self._pools or gpu not in self._reports.capacity_bytes:
                self._pools.of(gpu)
                self._coordinator.apply(GpuSeen(self.clock(), gpu, UNKNOWN_BYTES))
        container = self._containers.get(name) or self._new(name)
        self._coordinator.apply(Joined(self.clock(), name, contract))
        self._containers[name] = container
        container.join(contract, gpus)
        if self._activity.works(name):
            self._coordinator.apply(Working(self.clock(), name))
        self.activate(name)

    def change(self, name: str, contract: MemoryContract) -> None:
        """Other limits or urgency."""
        container = self._containers[name]
        self._coordinator.apply(Changed(self.clock(), name, contract))
        container.change(contract)

    def leave(self, name: str) -> None:
        """Its grant is gone: what is away of it is gone, too."""
        container = self._containers.pop(name, None)
        if container is None:
            return
        self._readers.remove(name)
        container.leave()
        self._decisions.active.discard(name)
        for part in (self._activity, self.reasons, self.blocks, self.counts):
            part.forget(name)
        self._coordinator.drop(name)
        self._coordinator.apply(Left(self.clock(), name))

    def take(self, name: str, connection: Connection) -> None:
        """A welcomed connection for bursts: read and closed here from now on."""
        container = self._containers.get(name)
        if container is None:
            connection.close()
            return
        container.take(connection)
        self.activate(name)

    def use(self, name: str, gpu: str, resident_bytes: int, elastic_bytes: int) -> None:
        """What a container has leased in all, with everything that was granted to it by `request` and `decided` until now."""
        if (container := self._containers.get(name)) is not None:
            granted = self._coordinator.granted_bytes(name, gpu)
            container.use(gpu, resident_bytes + granted[0], elastic_bytes + granted[1])

    def request(
        self, id_: str, name: str, gpu: str, need_bytes: int, *, elastic: bool, wait_s: float
    ) -> NodeAnswer:  # fmt: skip
        """Decide on a lease. Above the guarantee it waits for at most `wait_s`."""
        container = self._containers[name]
        if self._free.grants(container, gpu, need_bytes, self._decisions.active):
            container.granted(gpu, need_bytes, elastic=elastic)
            container.tell_used(gpu)
            return NodeAnswer.GRANTED
        wait_s = min(WAIT_MOST_S, max(0.0, wait_s))
        self._coordinator.requests[id_] = WaitingRequest(id_, name, gpu, need_bytes, elastic)
        self._coordinator.apply(Requested(self.clock(), name, id_, gpu, need_bytes, elastic, wait_s))
        self._decisions.decide()
        answer = self._coordinator.answer(id_)
        if answer is None:
            return NodeAnswer.WAITS
        return NodeAnswer.GRANTED if answer[0].granted else NodeAnswer.REFUSED

    def decides(self, gpu: str) -> bool:
        """Whether requests for memory of a GPU need `request`: some container there may exceed its guarantee, or is above it."""
        return gpu in self._reports.capacity_bytes and any(one.bursts(gpu) for one in self._containers.values())

    def ceiling(self, name: str, gpu: str) -> Ceiling | None:
        """The most that a container can ever have of a GPU in all; None: not known."""
        container = self._containers.get(name)
        if container is None or container.contract is None or gpu not in container.contract.gpus:
            return None
        pool = self._pools[gpu]
        pool_bytes = pool.pool_bytes if pool.ready else None
        return ceiling(container.contract.gpus[gpu][0], pool_bytes, self._reports.most_bytes(gpu))

    def free_bytes(self, name: str, gpu: str) -> int:
        """What a container may be granted now beyond any request: within its guarantee, and nothing while others wait for memory of the GPU."""
        container = self._containers[name]
        if container.contract is None or not self._free.grants(container, gpu, 0, self._decisions.active):
            return 0
        guarantee_bytes = container.contract.gpus[gpu][0]
        return max(0, min(self._free.of(gpu), guarantee_bytes - container.used_bytes(gpu)))

    def process_away_bytes(self, name: str, pid: int, gpu: str) -> int:
        """Memory of one process, by its host pid, that is in host memory now."""
        container = self._containers.get(name)
        return container.process_away_bytes(pid, gpu) if container is not None else 0

    def process_elastic_bytes(self, name: str, pid: int, gpu: str) -> int:
        """Elastic memory of one process, by its host pid, as it last stated."""
        container = self._containers.get(name)
        return container.process_elastic_bytes(pid, gpu) if container is not None else 0

    def ready(self, gpu: str) -> bool:
        """Whether memory of a GPU can be moved now. No, while that is not known."""
        return self._ready.ready(gpu)

    def changed_gpus(self) -> frozenset[str]:
        """The GPUs for which limits are to be sent again, since the last call: what `ready` says of them is known now, or changed."""
        return self._ready.changed()

    def stated(self) -> list[Stated]:
        """How much elastic memory processes have, as they stated since the last call."""
        stated, self._stated = self._stated, {}
        return [Stated(*key, elastic_bytes) for key, elastic_bytes in stated.items()]

    def missing(self, gpu: str) -> str:
        """Why nothing can be moved from a GPU now; empty: it can. As the host pool's program states it, or else what the arbiter sees."""
        if gpu not in self._pools:
            return ""
        if self._pools[gpu].ready:
            return "" if gpu in self._reports.capacity_bytes else "the memory of the GPU was not read yet"
        return self._pools.missing(gpu)

    def copier_pids(self) -> frozenset[int]:
        """The copiers, by host pid: they use memory of the GPUs and belong to no container."""
        return self._pools.copier_pids()

    def withdraw(self, id_: str) -> None:
        """Nobody waits for it any more. If it was granted and `decided` has not said so, it is not."""
        if self._coordinator.requests.pop(id_, None) is not None:
            self._coordinator.apply(Withdrawn(self.clock(), id_))
        elif (answer := self._coordinator.answer(id_)) is not None and answer[0].granted:
            request, container = answer[1], self._containers[answer[1].name]
            container.granted(request.gpu, -request.bytes, elastic=request.elastic)
            container.tell_used(request.gpu)

    def decided(self) -> list[Decided]:
        """The next request that waited and is decided; empty: there is none."""
        return self._coordinator.decided()

    def notices(self) -> list[Notice]:
        """What is to be known of containers, since the last call."""
        notices = self._coordinator.notices()
        self.reasons.note(notices)
        return notices

    def working(self, name: str, works: bool) -> None:
        """It has work for its GPUs, or no more. From any thread."""
        self._activity.working(name, works=works)

    def announced(self, name: str, in_s: float) -> None:
        """It announces work. From any thread."""
        self._activity.announced(name, in_s)

    def knows(self, name: str) -> bool:
        """Whether a container has joined."""
        return name in self._containers and self._containers[name].contract is not None

    def status(self, name: str) -> SwapStatus:
        """Of a container that has joined."""
        container = self._containers[name]
        away = [gpu for gpu in container.gpus if container.away_bytes(gpu)]
        return self.reasons.status(container, self.blocks, pools_ready=self._pools.ready(away))

    def throttles(self) -> dict[str, int]:
        """How often each container was throttled here; only containers that ever were. From any thread."""
        return self._readers.throttles()

    def gpus(self) -> list[GpuSwapFacts]:
        """Of each GPU whose capacity is known."""
        return self._reports.facts()

    def awake(self) -> None:
        """The arbiter's loop came round: time since then in which it does not is no container's."""
        self._coordinator.awake_at_s = self.clock()

    def close(self) -> None:
        """The arbiter ends. What is away stays away, and the records say where it is."""
        for container in self._containers.values():
            self._readers.remove(container.name)
            container.close()
        self._containers.clear()  # none leaves: that would end its records
        self._pools.close()
        self.poller.remove(self._wake_fd)
        os.close(self._wake_fd)
        self.poller.close()

    # To the containers

    def _new(self, name: str) -> SwapContainer:
        container = SwapContainer(name, self)
        self._readers.add(name, container.attention)
        return container

    def pool(self, gpu: str) -> HostPool:
        """Of a GPU."""
        return self._pools.of(gpu)

    def apply(self, event: ContainerEvent) -> None:
        """To the policy."""
        quiet = isinstance(event, Used) and not self._decisions.busy and self._free.of(event.gpu) >= 0
        self._coordinator.apply(event, decides=not quiet)

    def paused(self, name: str) -> bool:
        """Whether it must not run as the policy has it, or that is to be decided first."""
        return self._coordinator.paused(name)

    def states(self, name: str, pid: int, gpu: str, elastic_bytes: int) -> None:
        """A process has so much elastic memory."""
        self._stated[name, pid, gpu] = elastic_bytes

    def knows_limits(self, gpu: str) -> bool:
        """Whether limits above guarantees apply to a GPU or not; False: that will be known soon."""
        return self._ready.known(gpu)

    def activate(self, name: str) -> None:
        """Its turn is due."""
        self._decisions.active.add(name)

    # Records and traces

    def _adopt(self, gpu: str) -> None:
        pool = self.pool(gpu)
        for record in pool.stored():
            if record.name not in self._containers:
                self._containers[record.name] = self._new(record.name)
                self.activate(record.name)
            self._containers[record.name].adopt(record, gpu)

    def _state(self) -> Iterator[Event]:
        requests = self._coordinator.requests.values()
        return self._reports.state(self.clock(), self._containers.values(), requests)

    def _woken(self) -> None:
        try:
            os.eventfd_read(self._wake_fd)
        except BlockingIOError:
            return

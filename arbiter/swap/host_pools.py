"""The host pools of a node, one for each GPU that was named."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from math import inf
from pathlib import Path

from arbiter.swap.copier import Copier
from arbiter.swap.host_pool import HostPool
from arbiter.swap.poller import Poller
from arbiter.swap.pool_status import missing_pool
from arbiter.swap.records_file import RecordsFile


class HostPools(Mapping[str, HostPool]):
    """By GPU. `copiers`: folder with <GPU UUID>.sock. `records`: folder of the records."""

    def __init__(
        self,
        copiers: Path,
        records: Path,
        boot_id: str,
        poller: Poller,
        clock: Callable[[], float],
        connect: Callable[[Path], Copier],
    ) -> None:
        self._copiers, self._records, self._boot_id = copiers, records, boot_id
        self._poller, self._clock, self._connect = poller, clock, connect
        self._pools: dict[str, HostPool] = {}

    def __getitem__(self, gpu: str) -> HostPool:
        return self._pools[gpu]

    def __iter__(self) -> Iterator[str]:
        return iter(self._pools)

    def __len__(self) -> int:
        return len(self._pools)

    def of(self, gpu: str) -> HostPool:
        """Of a GPU, from now on."""
        if gpu not in self._pools:
            file = RecordsFile(self._records, gpu, self._boot_id)
            self._pools[gpu] = HostPool(
                gpu, self._copiers / f"{gpu}.sock", file, self._poller, self._clock, self._connect
            )
        return self._pools[gpu]

    def ready(self, gpus: Iterable[str]) -> bool:
        """Whether the copiers of all these take jobs."""
        return all(self._pools[gpu].ready for gpu in gpus)

    def missing(self, gpu: str) -> str:
        """Why a pool is not ready; empty: it is. As the host pool's program states it, or else what the arbiter sees."""
        pool = self._pools[gpu]
        return "" if pool.ready else missing_pool(self._copiers, gpu, self._boot_id) or pool.reason

    def copier_pids(self) -> frozenset[int]:
        """The copiers, by host pid."""
        return frozenset(pool.copier_pid for pool in self.values() if pool.copier_pid)

    def turn(self, due_s: float = inf) -> None:
        """What is due in those whose deadline is not later."""
        for pool in self.values():
            if pool.deadline_s() <= due_s:
                pool.turn()

    def deadline_s(self) -> float:
        """When `turn` is due."""
        return min((pool.deadline_s() for pool in self.values()), default=inf)

    def close(self) -> None:
        """What is away stays away, and the records say where it is."""
        for pool in self.values():
            pool.write()
            pool.close()

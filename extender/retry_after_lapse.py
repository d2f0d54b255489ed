"""Make kube-scheduler retry pending pods when a reservation lapses: capacity comes free, and no event in the API shows it.

kube-scheduler retries a pod that filter rejected at the next event of any kind. If none comes, it retries the pod with all its
unschedulable pods, after 5 to 5.5 minutes (podMaxInUnschedulablePodsDuration). If a pending pod loses its status.nominatedNodeName,
kube-scheduler treats that like the end of a pod, and retries every pod of the same or a lower priority (updatePodInSchedulingQueue of
kube-scheduler 1.36). So one waiting pod of the highest priority is nominated to the node where capacity came free, and the nomination is
withdrawn: two writes, which leave nothing behind.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import Final

import structlog

from kube.client import Client
from kube.errors import ApiError
from kube.objects import Pod
from kube.patch import nominate

SETTLE_S: Final = 1.0
"""From a lapse to the retry: one retry for all reservations that lapse together, and for pods that are about to become unschedulable. Guessed."""

PERIOD_S: Final = 5.0
"""Between retries, and between tries of a write that failed. kube-scheduler's own back-off for a pod is 1 to 10 s."""

log = structlog.get_logger("extender.retry_after_lapse")


class Retrier:
    """`waiting` answers the pods for which kube-scheduler found no node, and which have no reservation."""

    def __init__(
        self,
        client: Client,
        waiting: Callable[[], Iterable[Pod]],
        *,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._client, self._waiting, self._sleep = client, waiting, sleep
        self._node = ""
        self._wake = asyncio.Event()
        self.retries = 0
        """Times that kube-scheduler was made to retry pods."""

    def capacity_freed(self, node: str) -> None:
        """A reservation on this node has lapsed."""
        self._node = node
        self._wake.set()

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await self._wake.wait()
            await self._sleep(SETTLE_S)
            self._wake.clear()
            try:
                await self._retry()
            except ApiError as error:
                log.warning("waiting pods are not retried yet", error=str(error))
                if error.transient or error.conflict or error.not_found:  # else another try would end as this one
                    self._wake.set()
            await self._sleep(PERIOD_S)

    async def _retry(self) -> None:
        pods = [pod for pod in self._waiting() if not pod.status.nominated_node_name]
        if not pods:
            return
        one = max(pods, key=lambda pod: pod.spec.priority or 0)
        await nominate(self._client, one.metadata, self._node)
        await self._withdraw(one)
        self.retries += 1
        log.info("waiting pods are retried: a reservation lapsed", node=self._node, pods=len(pods))

    async def _withdraw(self, pod: Pod) -> None:
        """However long it takes: kube-scheduler counts a nominated pod as running on its node."""
        while True:
            try:
                return await nominate(self._client, pod.metadata, None)
            except ApiError as error:
                if error.not_found or error.conflict:  # the pod is gone, and perhaps another has its name
                    return None
                log.warning("a nomination is not withdrawn yet", pod=pod.key, error=str(error))
            await self._sleep(PERIOD_S)

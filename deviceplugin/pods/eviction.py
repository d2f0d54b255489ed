"""Evict pods of this node through the eviction API, which enforces disruption budgets. Each waits for as long as it is wanted.

A budget that refuses (429) is waited for and never gone around: no pod is deleted here. An API server that is away, fails, or does not accept our token
is waited for too, however long, and counted as a failure now and then: the answer to a pod that two budgets select is also an error of the server (500). Only a
lasting refusal (as 403) ends an eviction. Whether the eviction is still wanted is read again
before every attempt, because a container's memory may come back meanwhile. The UID is a precondition, so a pod that took the name stays.
A right to evict reaches every node; the chart's admission policy `evictions` narrows it to the pods of the token's node.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from http import HTTPStatus
from typing import Any, Final, Protocol

import structlog

from deviceplugin.pods.pod_tasks import PodTasks, Reason
from deviceplugin.pods.removal import ATTEMPTS, BACKOFF_S, Sender
from kube import paths
from kube.errors import ApiError
from kube.objects import Pod
from vgpu.api.back_off import BackOff

REFUSED_BACKOFF_S: Final = (5.0, 120.0)
"""First and longest wait after a refusal by a budget, doubled each time. Guessed: a replacement of another pod of the budget takes seconds to minutes."""

log = structlog.get_logger("deviceplugin.pods.eviction")


class EvictionObserver(Protocol):
    """Knows whether a pod is still to leave, and reports."""

    def still_wanted(self, pod: Pod) -> bool:
        """Whether the reason for the eviction still applies, as far as is known."""

    def eviction_refused(self, pod: Pod, message: str, *, again: bool) -> None:
        """The API server refused: `message` is its sentence. `again`: it is tried again."""


class Evictor(PodTasks[bool]):
    """See the module. `count` is called when the pod is evicted or gone, with True, and with False after each `ATTEMPTS` attempts in a row that failed, and
    when the API server refuses for good; not when it is wanted no more."""

    def __init__(
        self,
        client: Sender,
        observer: EvictionObserver,
        count: Callable[[Reason, bool], None],
        *,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        super().__init__()
        self._client, self._observer, self._count, self._sleep = client, observer, count, sleep

    def evict(self, pod: Pod, reason: Reason) -> bool:
        """Begin. Returns False when this pod's eviction is in progress, accepted or refused for good."""
        return self._begin(pod, reason, self._until_evicted)

    def _ended(self, pod: Pod, reason: Reason, task: asyncio.Task[bool]) -> None:
        """An eviction that was accepted is remembered, and one that the API server refused for good: else it would be refused every few seconds. A pod that
        is stranded again is evicted then."""
        error = task.exception()
        if error is not None:
            if not isinstance(error, ApiError):
                self._tasks.pop(pod.uid, None)
            log.error(
                "a pod that has to go was not evicted", pod=pod.key, uid=pod.uid, reason=reason, error=str(error),
                exc_info=None if isinstance(error, ApiError) else error,
            )  # fmt: skip
            self._observer.eviction_refused(
                pod, error.message if isinstance(error, ApiError) else str(error), again=False
            )
            self._count(reason, False)
        elif task.result():
            log.info("pod evicted", pod=pod.key, uid=pod.uid, reason=reason)
            self._count(reason, True)
        else:
            self._tasks.pop(pod.uid, None)
            log.info("an eviction is no longer needed", pod=pod.key, uid=pod.uid, reason=reason)

    async def _until_evicted(self, pod: Pod, reason: Reason) -> bool:
        """Whether it is evicted or gone; False: that is wanted no more. Raises ApiError when the API server refuses for good."""
        failed, refused, in_a_row = BackOff(*BACKOFF_S), BackOff(*REFUSED_BACKOFF_S), 0
        while self._observer.still_wanted(pod):
            try:
                await self._client.send("POST", _path(pod), _eviction(pod))
            except ApiError as error:
                if error.not_found or error.conflict:  # gone, and perhaps another has its name
                    return True
                if error.status == HTTPStatus.TOO_MANY_REQUESTS:
                    in_a_row = 0
                    failed.succeeded()
                    wait_s = refused.failed(error.retry_after_s)
                    log.info("an eviction has to wait", pod=pod.key, wait_s=wait_s, error=str(error))
                    self._observer.eviction_refused(pod, error.message, again=True)
                    await self._sleep(wait_s)
                    continue
                if not (error.transient or error.unauthorized):
                    raise
                in_a_row += 1
                log.warning("a pod is not evicted yet", pod=pod.key, failures=in_a_row, error=str(error))
                if in_a_row % ATTEMPTS == 0:
                    self._observer.eviction_refused(pod, error.message, again=True)
                    self._count(reason, False)
                await self._sleep(failed.failed(error.retry_after_s))
            else:
                return True
        return False


def _path(pod: Pod) -> str:
    return paths.pod(pod.metadata.namespace, pod.metadata.name, "eviction")


def _eviction(pod: Pod) -> dict[str, Any]:
    meta = pod.metadata
    return {
        "apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": meta.name, "namespace": meta.namespace},
        "deleteOptions": {"preconditions": {"uid": meta.uid}},
    }  # fmt: skip

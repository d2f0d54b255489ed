"""Delete pods of this node so that their controllers make others: each once, tried a bounded number of times.

It is DELETE and no eviction: these pods use what is not theirs, so no disruption budget protects them. `pods.eviction` evicts the others. The chart's
admission policy `deletions` narrows the right to one node. The UID is a precondition, so the pod that took a deleted one's name stays. The resource version is
none: the kubelet writes a pod's status all the time, and the reason stands whatever it wrote.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, Final, Protocol

import structlog

from deviceplugin.pods.pod_tasks import PodTasks, Reason
from kube import paths
from kube.errors import ApiError
from kube.objects import Pod
from vgpu.api.back_off import BackOff

ATTEMPTS: Final = 8
BACKOFF_S: Final = (0.5, 30.0)
"""First and longest wait between attempts, doubled each time: about a minute in all. Guessed: longer than an API server's restart."""

log = structlog.get_logger("deviceplugin.pods.removal")


class Sender(Protocol):
    """The API server, as far as this module uses it."""

    async def send(self, method: str, path: str, body: object = None) -> bytes:
        """Raises ApiError."""


class Remover(PodTasks[None]):
    """See the module. `count` is called at each end: True when the pod is deleted or gone, False when it could not be."""

    def __init__(
        self,
        client: Sender,
        count: Callable[[Reason, bool], None],
        *,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        super().__init__()
        self._client, self._count, self._sleep = client, count, sleep

    def remove(self, pod: Pod, reason: Reason) -> bool:
        """Begin. Returns False when this pod's removal is under way or done."""
        return self._begin(pod, reason, self._until_deleted)

    def _ended(self, pod: Pod, reason: Reason, task: asyncio.Task[None]) -> None:
        """Whatever ended a removal, only one that is done is remembered."""
        error = task.exception()
        if error is None:
            log.info("pod deleted", pod=pod.key, uid=pod.uid, reason=reason)
        else:
            self._tasks.pop(pod.uid, None)
            log.error(
                "a pod that has to go was not deleted", pod=pod.key, uid=pod.uid, reason=reason, error=str(error),
                exc_info=None if isinstance(error, ApiError) else error,
            )  # fmt: skip
        self._count(reason, error is None)

    async def _until_deleted(self, pod: Pod, _: Reason) -> None:
        """Raises ApiError when the API server refuses, or has not answered, or not accepted our token, `ATTEMPTS` times."""
        meta = pod.metadata
        options: dict[str, Any] = {"apiVersion": "v1", "kind": "DeleteOptions", "preconditions": {"uid": meta.uid}}
        back_off = BackOff(*BACKOFF_S)
        for left in reversed(range(ATTEMPTS)):
            try:
                await self._client.send("DELETE", paths.pod(meta.namespace, meta.name), options)
            except ApiError as error:
                if error.not_found or error.conflict:  # gone, and perhaps another has its name
                    return
                if not ((error.transient or error.unauthorized) and left):
                    raise
                log.warning("a pod is not deleted yet", pod=pod.key, attempts_left=left, error=str(error))
                await self._sleep(back_off.failed(error.retry_after_s))
            else:
                return

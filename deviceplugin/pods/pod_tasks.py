"""A task for each pod that has to leave: begun once, remembered while the pod is there, ended with the program."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Coroutine
from typing import Any, Generic, Literal, TypeVar

from kube.objects import Pod

Reason = Literal["swapped", "over-limit", "bypass", "stranded", "unhealthy-gpu"]
"""Why a pod has to leave."""

T = TypeVar("T")


class PodTasks(ABC, Generic[T]):
    """See the module. T is what a task returns."""

    def __init__(self) -> None:
        self._tasks: dict[str, asyncio.Task[T]] = {}
        """Pod UID -> its task, in progress or done."""

    @abstractmethod
    def _ended(self, pod: Pod, reason: Reason, task: asyncio.Task[T]) -> None:
        """A task ended by itself: with a result or an exception."""

    def _begin(self, pod: Pod, reason: Reason, work: Callable[[Pod, Reason], Coroutine[Any, Any, T]]) -> bool:
        """Returns False when this pod has a task, in progress or done."""
        if pod.uid in self._tasks:
            return False
        task = asyncio.get_running_loop().create_task(work(pod, reason))
        self._tasks[pod.uid] = task
        task.add_done_callback(lambda done: None if done.cancelled() else self._ended(pod, reason, done))
        return True

    def forget_the_gone(self, alive: Collection[str]) -> None:
        """Drop what is remembered of pods that are not among these UIDs."""
        self._tasks = {uid: task for uid, task in self._tasks.items() if uid in alive or not task.done()}

    async def settled(self) -> None:
        """Return when no task is in progress."""
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    async def close(self) -> None:
        """End what is in progress."""
        for task in self._tasks.values():
            task.cancel()
        await self.settled()

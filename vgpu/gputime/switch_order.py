"""Which switch a GPU makes next, so that a container with several GPUs begins to run on all of them at once.

Each GPU is switched by itself, and the GPUs of a container become free at different times. A kernel that already runs on the first of them would spin until
the kernels on the others arrive: time that the GPU loses to skew. So a GPU resumes such a container only when no suspend is due on any of its GPUs.

A suspend waits for nothing. So no GPU waits for another in a circle, whatever the containers' sets of GPUs have in common. A GPU whose driver does not answer
keeps the resume waiting; what becomes of the container then is decided by `vgpu.gputime.scheduler` (`Hung`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple


class DueSwitch(NamedTuple):
    """A switch that is due on one GPU."""

    name: str
    """The container."""
    on: bool
    """Whether to resume it."""
    gpus: frozenset[str]
    """All GPUs that it uses."""
    at_once: bool = False
    """The resume waits for nothing: channels of it may be disabled that it is owed."""


def next_switch(gpu: str, due: Callable[[str], Iterable[DueSwitch]]) -> DueSwitch | None:
    """The next switch of a GPU: suspends first, so that no container is resumed beside one that is to run alone. `due`: GPU -> the switches due there; read
    up to the first suspend. None = nothing, or only what waits for other GPUs."""
    resumes = []
    for one in due(gpu):
        if not one.on:
            return one
        resumes.append(one)
    resumes.sort(key=lambda one: not one.at_once)
    return next((one for one in resumes if one.at_once or not _waits(one, gpu, due)), None)


def _waits(resume: DueSwitch, gpu: str, due: Callable[[str], Iterable[DueSwitch]]) -> bool:
    return any(not one.on for other in resume.gpus if other != gpu for one in due(other))

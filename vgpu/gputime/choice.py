"""Which of the containers that may run now get the GPUs, by urgency, slices and served time: the rules of `vgpu.gputime.scheduler`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import inf

from vgpu.gputime.container_state import ABOVE, ContainerState, gpus_by_slices
from vgpu.gputime.timing import Timing


def choose(states: Mapping[str, ContainerState], ready: list[str], why: dict[str, str], settings: Timing) -> set[str]:
    """The containers of `ready` that run, with time slices started for them. Their reasons are written to `why`."""
    sliced = gpus_by_slices(map(states.__getitem__, ready))
    order = sorted(ready, key=lambda name: _order(name, states[name]))
    on: set[str] = set()
    taken: dict[str, tuple[int, int] | None] = {}
    """GPU -> urgency of the containers that share it without slices, or None if one container uses it alone."""
    kept: dict[str, float] = {}
    """GPU -> how long others may use it before the next container in order, one with several GPUs, can run on it."""
    for name in order:
        state = states[name]
        gpus = state.container.gpus
        alone = state.starvation_left_s > 0 or any(sliced[gpu] for gpu in gpus)
        blocked = [gpu for gpu in gpus if gpu in taken and (alone or taken[gpu] != state.urgency)]
        if blocked:
            why[name] = "waits"
            if len(gpus) > 1:
                left_s = max(_left_s((states[other] for other in on), gpu) for gpu in blocked)
                kept.update({gpu: min(left_s, kept.get(gpu, inf)) for gpu in gpus if gpu not in taken})
            continue
        lent_s = min((kept[gpu] for gpu in gpus if gpu in kept), default=inf)
        if alone:
            _take_quantum(state, (states[other] for other in ready), lent_s, settings)
        why[name] = _reason(state, alone=alone)
        on.add(name)
        taken.update(dict.fromkeys(gpus, None if alone else state.urgency))
    return on


def _order(name: str, state: ContainerState) -> tuple[bool, tuple[int, int], bool, float, str]:
    return (
        not state.starvation_left_s,
        state.urgency,
        not (state.on and state.slice_left_s),
        state.served_here,
        name,
    )


def _reason(state: ContainerState, *, alone: bool) -> str:
    if state.starvation_left_s:
        return "starved"
    if state.urgency == ABOVE:
        return "burst"
    return "slice" if alone else "shares"


def _take_quantum(state: ContainerState, ready: Iterable[ContainerState], lent_s: float, settings: Timing) -> None:
    """Continue its time slice or start one, for at most `lent_s`."""
    if state.on and state.slice_left_s:
        return
    part = state.container.weight / sum(other.container.weight for other in ready if state.shares_slices_with(other))
    state.slice_left_s = min(lent_s, max(settings.quantum_least_s, part * settings.frame_s))


def _left_s(running: Iterable[ContainerState], gpu: str) -> float:
    """How long the containers that run on a GPU can keep it at most."""
    return max((state.slice_left_s or inf for state in running if gpu in state.container.gpus), default=0.0)

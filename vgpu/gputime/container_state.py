"""The state of one container in the GPU-time scheduler: what `vgpu.gputime.scheduler` stores between two events."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Final, NamedTuple

from vgpu.api.names import CLASSES
from vgpu.gputime.events import SchedulingParameters
from vgpu.gputime.guarantee import Guarantee
from vgpu.gputime.usage import GpuTimeUsage

ABOVE: Final = (len(CLASSES), 0)
"""Urgency of a container above its guarantee: after every class and level."""
EWMA: Final = 0.1
"""Weight of a new measurement of a pause or a switch in the expected value. Guessed: after ten measurements an outlier has no effect."""
LONG_S: Final = 0.003
"""Longer pauses and stretches of work count as this, so that one of seconds loses its effect as fast as any other. Guessed: four times a switch."""


class Past(NamedTuple):
    """Credits and served time at an earlier moment."""

    credit_s: float
    served: float
    guaranteed_s: float = 0.0
    served_above: float = 0.0


@dataclass(slots=True)
class ContainerState:
    """See the module. Times are those of the events."""

    container: SchedulingParameters
    credit_s: float
    served: float
    """Seconds that it ran, per unit of weight. Orders containers of equal urgency. Without time above its guarantee: what nobody else needed
    gives others no claim against it."""
    on: bool = True
    blocked: bool = False
    """It may not run: some of its memory is away, or is about to be."""
    hung: bool = False
    """A GPU of it does not answer."""
    working: bool = False
    idle_since_s: float | None = None
    """When its last work ended."""
    kept_until_s: float = -inf
    """Until then it keeps the GPU as if its last work continued."""
    kept_free: bool = False
    """It does not pay for that time: only containers above their guarantees wait for it."""
    pause_s: float = 0.0
    """Recent average time between the end of work and the next work."""
    work_s: float = LONG_S
    """Recent average running time from the beginning of work to its end. Assumed to be long until it is known."""
    began_on_s: float = 0.0
    """Its total running time when its last work began."""
    announced_from_s: float = inf
    announced_until_s: float = -inf
    announced_due_s: float = inf
    """The time for which work is announced; inf = none is announced."""
    worked_before: bool = False
    """Whether it had work when it announced more. The end of that work is not the end of the announced work."""
    paid_until_s: float = -inf
    """Up to when its last running time with work is recorded."""
    slice_left_s: float = 0.0
    """The remaining part of its time slice."""
    waits_since_s: float | None = None
    starvation_left_s: float = 0.0
    """The remaining part of the slice granted against starvation."""
    usage: GpuTimeUsage = field(default_factory=GpuTimeUsage)
    guarantee: Guarantee | None = None
    """None = it may not burst: its cap is its guarantee, if it has one."""
    urgency: tuple[int, int] = field(init=False)
    """A lower value is more urgent. Of its class and level, or `ABOVE`."""
    cap: float = field(init=False)
    """Part of a GPU's time; 0 = none was requested."""

    def __post_init__(self) -> None:
        self.become(self.container)

    def become(self, container: SchedulingParameters) -> None:
        """Replace the requested parameters."""
        self.container = container
        self.cap = container.cap_percent / 100
        self.urgency = ABOVE if self.guarantee is not None and self.guarantee.above else self.own_urgency

    @property
    def own_urgency(self) -> tuple[int, int]:
        """That of its class and level."""
        return CLASSES.index(self.container.service_class), self.container.level

    @property
    def served_here(self) -> float:
        """Orders it among containers of its present urgency."""
        return self.guarantee.served if self.guarantee is not None and self.guarantee.above else self.served

    def rank(self, guarantee: Guarantee, *, above: bool) -> None:
        """Whether it has used its guarantee, from this decision on. It enters its new urgency without a time slice and without having waited there."""
        if guarantee.above is not above:
            guarantee.above, self.urgency = above, ABOVE if above else self.own_urgency
            self.waits_since_s, self.starvation_left_s, self.slice_left_s = None, 0.0, 0.0

    def active(self, now_s: float) -> bool:
        """Whether it has work, has announced work for now, or still keeps the GPU after work."""
        return self.working or self.announced_from_s <= now_s < self.announced_until_s or now_s < self.kept_until_s

    @property
    def barred(self) -> bool:
        """Whether it is in no decision: it is blocked, or is suspended and cannot be resumed on all of its GPUs."""
        return self.blocked or (self.hung and not self.on)

    def rests(self, now_s: float, credit_most_s: float) -> bool:
        """Whether its state stays the same until its next event: it is on, has no work and none announced, and its credit is at the maximum."""
        if self.working or self.blocked or not self.on or now_s < max(self.announced_until_s, self.kept_until_s):
            return False
        if self.guarantee is not None and self.guarantee.credit_s < self.guarantee.most_s:
            return False
        return not self.cap or self.credit_s >= credit_most_s

    def block(self) -> None:
        """It may not run until `unblock`. It waits for memory then and not for GPU time, so it has no claim to time against starvation."""
        self.blocked = True
        self.waits_since_s, self.starvation_left_s, self.slice_left_s = None, 0.0, 0.0

    def unblock(self, least_served: tuple[float, float]) -> None:
        """It may run again, as after idleness: it has no accumulated priority over containers that ran meanwhile."""
        if self.blocked:
            self.blocked = False
            self.catch_up(least_served)

    def hang(self, least_served: tuple[float, float], *, hung: bool) -> None:
        """A GPU of it does not answer, or does again. It waits for that GPU and not for GPU time, as while it is blocked. But the time since which it waits
        stays: who can cause hangs must not end the guarantee against starvation."""
        before, self.hung = self.barred, hung
        if before is not self.barred:
            self.starvation_left_s = self.slice_left_s = 0.0
        if before and not self.barred:
            self.catch_up(least_served)

    def catch_up(self, least_served: tuple[float, float]) -> None:
        """It has no accumulated priority. `least_served`: of the others, and of those above their guarantees."""
        self.served = max(self.served, least_served[0])
        if self.guarantee is not None:
            self.guarantee.served = max(self.guarantee.served, least_served[1])

    def precedes_burst_of(self, other: ContainerState) -> bool:
        """Whether the other is above its guarantee on a GPU of this one, which is not."""
        above = other.urgency == ABOVE != self.urgency
        return above and not self.container.gpus.isdisjoint(other.container.gpus)

    def shares_slices_with(self, other: ContainerState) -> bool:
        """Whether both share a GPU with equal urgency. True of a container and itself."""
        return self.urgency == other.urgency and not self.container.gpus.isdisjoint(other.container.gpus)

    def begin(self, now_s: float) -> None:
        """Work came after idleness."""
        if self.idle_since_s is not None:
            self.pause_s += EWMA * (min(now_s - self.idle_since_s, LONG_S) - self.pause_s)
        self.working, self.began_on_s = True, self.usage.on_s
        self.usage.arrivals += 1

    def end(self, now_s: float, kept_s: float) -> None:
        """Its work ended. It keeps the GPU for `kept_s`."""
        if self.working:
            self.work_s += EWMA * (min(self.usage.on_s - self.began_on_s, LONG_S) - self.work_s)
            self.idle_since_s, self.kept_until_s = now_s, now_s + kept_s
        self.working, self.worked_before = False, False

    def pay(self, paid_s: float) -> None:
        """Pay for `paid_s` of running time."""
        self.credit_s -= paid_s if self.cap else 0.0
        self.usage.on_s += paid_s
        if self.guarantee is not None and self.guarantee.runs_above:
            self.guarantee.served += paid_s / self.container.weight
            self.usage.burst_s += paid_s
            return
        self.served += paid_s / self.container.weight
        if self.guarantee is not None:
            self.guarantee.credit_s -= paid_s

    def pay_late(self, owed_s: float, most_s: float) -> None:
        """Pay for time in which it ran and was not allowed to: by its guarantee too, for others had a claim to that time. At most `most_s` of debt
        follow from it."""
        least_s = min(self.credit_s, -most_s)
        self.credit_s -= owed_s if self.cap else 0.0
        self.credit_s = max(self.credit_s, least_s)
        self.served += owed_s / self.container.weight
        self.usage.on_s += owed_s
        if self.guarantee is not None:
            self.guarantee.owe(owed_s, most_s)

    def before(self, seconds: float, rate: float) -> Past:
        """Its state `seconds` ago, if each of these seconds cost `rate`."""
        credit_s, ran = self.credit_s + seconds * max(0.0, rate - self.cap), seconds * rate / self.container.weight
        of = self.guarantee
        if of is None:
            return Past(credit_s, self.served - ran)
        if of.runs_above:
            return Past(credit_s, self.served, of.credit_s, of.served - ran)
        return Past(credit_s, self.served - ran, of.credit_s + seconds * max(0.0, rate - of.part), of.served)

    def forgive(self, before: Past, most_s: float, since_s: float, at_s: float) -> None:
        """No decision was made from `since_s` to `at_s`. That time adds at most `most_s` of debt, uses no time slice and does not count as waiting."""
        self.served = before.served
        if self.cap:
            self.credit_s = max(self.credit_s, min(before.credit_s, -most_s))
        if self.guarantee is not None:
            self.guarantee.served = before.served_above
            self.guarantee.credit_s = max(self.guarantee.credit_s, min(before.guaranteed_s, -self.guarantee.most_s))
        if self.waits_since_s is not None:
            self.waits_since_s = max(self.waits_since_s, min(at_s, self.waits_since_s + at_s - since_s))

    def rate(self, crowd: Mapping[str, int]) -> float:
        """The cost of a second of running. `crowd`: number of running containers with work, by GPU."""
        if self.kept_free and not self.working:
            return 0.0
        return min(1 / max(crowd.get(gpu, 1) for gpu in self.container.gpus), self.container.pace)

    def end_announcement(self) -> None:
        """The announced work is over."""
        self.announced_from_s, self.announced_until_s, self.announced_due_s = inf, -inf, inf


def crowd_of(states: Iterable[ContainerState], now_s: float) -> dict[str, int]:
    """Number of running containers with work, by GPU: the driver slices its time between them."""
    crowd: dict[str, int] = {}
    for state in states:
        if state.on and state.active(now_s):
            for gpu in state.container.gpus:
                crowd[gpu] = crowd.get(gpu, 0) + 1
    return crowd


def gpus_by_slices(ready: Iterable[ContainerState]) -> dict[str, bool]:
    """GPU -> whether its most urgent containers need time slices on it."""
    first: dict[str, list[ContainerState]] = {}
    for state in ready:
        for gpu in state.container.gpus:
            rivals = first.setdefault(gpu, [])
            if not rivals or state.urgency < rivals[0].urgency:
                first[gpu] = [state]
            elif state.urgency == rivals[0].urgency:
                rivals.append(state)
    return {gpu: _unequal(states) for gpu, states in first.items()}


def _unequal(states: Sequence[ContainerState]) -> bool:
    """Whether these containers, of one urgency on one GPU, need time slices. Between equals without caps the driver itself slices time well."""
    weights = {state.container.weight for state in states}
    return len(weights) > 1 or any(state.cap or len(state.container.gpus) > 1 for state in states)

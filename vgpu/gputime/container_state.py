"""How one container stands in the sharing of GPU time: what `vgpu.gputime.scheduler` remembers of it between two events."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf
from typing import Final

from vgpu.api.names import CLASSES
from vgpu.gputime.events import Container
from vgpu.gputime.usage import Usage

EWMA: Final = 0.1
"""Part of a new measurement, of a pause or a switch, in what is expected. Guessed: ten forget an outlier."""
LONG_S: Final = 0.003
"""Longer pauses and stretches of work count as this: one of seconds is forgotten as fast as any other. Guessed: four times what a switch costs."""


@dataclass(slots=True)
class ContainerState:
    """See the module. Times are those of the events."""

    container: Container
    credit_s: float
    served: float
    """Seconds on, for each unit of weight. Orders equals."""
    on: bool = True
    working: bool = False
    idle_since_s: float | None = None
    """When its last work ended."""
    kept_until_s: float = -inf
    """Until then it has the GPU as if its last work went on."""
    pause_s: float = 0.0
    """Between the end of work and the next, as is usual of late."""
    work_s: float = LONG_S
    """On, from the beginning of work to its end, as is usual of late. Taken to be long until it is known."""
    began_on_s: float = 0.0
    """What it had been on for when its last work began."""
    announced_from_s: float = inf
    announced_until_s: float = -inf
    announced_due_s: float = inf
    """When work was announced to come; inf = nothing is announced."""
    worked_before: bool = False
    """Had it work when it hinted? The end of that is not the end of what was announced."""
    paid_until_s: float = -inf
    """Up to when its last time on with work is in the records."""
    quantum_left_s: float = 0.0
    """What is left of its time slice."""
    waits_since_s: float | None = None
    slice_s: float = 0.0
    """What is left of the slice it was given against starvation."""
    usage: Usage = field(default_factory=Usage)
    urgency: tuple[int, int] = field(init=False)
    """Less is more urgent."""
    cap: float = field(init=False)
    """Part of a GPU's time; 0 = none was requested."""

    def __post_init__(self) -> None:
        self.become(self.container)

    def become(self, container: Container) -> None:
        """It requests this from now on."""
        self.container = container
        self.urgency, self.cap = (CLASSES.index(container.service_class), container.level), container.cap_percent / 100

    def active(self, now_s: float) -> bool:
        """Has it work, is it about to have some, or does it keep the GPU after some?"""
        return self.working or self.announced_from_s <= now_s < self.announced_until_s or now_s < self.kept_until_s

    def rests(self, now_s: float, credit_most_s: float) -> bool:
        """Does nothing change for it until it is heard of? It is on, has no work nor any to come, and all the credit that can be saved up."""
        if self.working or not self.on or now_s < max(self.announced_until_s, self.kept_until_s):
            return False
        return not self.cap or self.credit_s >= credit_most_s

    def shares_slices_with(self, other: ContainerState) -> bool:
        """Are they equals on one GPU? So is each with itself."""
        return self.urgency == other.urgency and not self.container.gpus.isdisjoint(other.container.gpus)

    def begin(self, now_s: float) -> None:
        """Work came after idleness."""
        if self.idle_since_s is not None:
            self.pause_s += EWMA * (min(now_s - self.idle_since_s, LONG_S) - self.pause_s)
        self.working, self.began_on_s = True, self.usage.on_s
        self.usage.arrivals += 1

    def end(self, now_s: float, kept_s: float) -> None:
        """It has no more work, and keeps the GPU for so long."""
        if self.working:
            self.work_s += EWMA * (min(self.usage.on_s - self.began_on_s, LONG_S) - self.work_s)
            self.idle_since_s, self.kept_until_s = now_s, now_s + kept_s
        self.working, self.worked_before = False, False

    def pay(self, paid_s: float) -> None:
        """For so long on."""
        self.credit_s -= paid_s if self.cap else 0.0
        self.served += paid_s / self.container.weight
        self.usage.on_s += paid_s

    def before(self, seconds: float, rate: float) -> tuple[float, float]:
        """Its credit and what it was served so many seconds ago, when each of them has cost it `rate`."""
        return self.credit_s + seconds * max(0.0, rate - self.cap), self.served - seconds * rate / self.container.weight

    def forgive(self, before: tuple[float, float], most_s: float, since_s: float, at_s: float) -> None:
        """From `since_s` to `at_s` nobody decided: that makes no debt of more than `most_s`, costs no time slice and is no waiting."""
        credit_s, self.served = before
        if self.cap:
            self.credit_s = max(self.credit_s, min(credit_s, -most_s))
        if self.waits_since_s is not None:
            self.waits_since_s = max(self.waits_since_s, min(at_s, self.waits_since_s + at_s - since_s))

    def end_announcement(self) -> None:
        """What was announced is over."""
        self.announced_from_s, self.announced_until_s, self.announced_due_s = inf, -inf, inf

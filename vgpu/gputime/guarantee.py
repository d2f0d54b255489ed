"""The guarantee of a container that may burst: the part of its GPU time that does not depend on what others leave.

Such a container has two credits. That of its cap is the limit in all, and the state of every capped container has it (`ContainerState.credit_s`). That of
its guarantee is here: it is earned at the guaranteed part, kept for as many frames as the other, and paid only for time in which the container runs
by its guarantee. So the guarantee is scheduled as a cap of the same size would be, and what the container uses above it takes nothing from it.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf


@dataclass(slots=True)
class Guarantee:
    """See the module. Seconds; `part` of a GPU's time."""

    part: float
    credit_s: float
    frame_credit_s: float
    """What it earns in a frame."""
    most_s: float
    """Credit that can be saved up."""
    above: bool = False
    """By the last decision it has used its guarantee: it comes after every other container."""
    runs_above: bool = False
    """Whether the time in which it runs now is above its guarantee. Not so while it is suspended for the end of its guarantee: it pays for the switch."""
    served: float = 0.0
    """Seconds that it ran above its guarantee, per unit of weight. Orders the containers above theirs."""

    def earn(self, passed_s: float) -> None:
        """Time passed."""
        self.credit_s = min(self.credit_s + self.part * passed_s, self.most_s)

    def lasts(self, *, on: bool, suspend_s: float, little_s: float) -> bool:
        """Whether it has credit to run by its guarantee. One that runs by it goes on until the credit only pays for the suspend; any other waits for
        a frame of credit, as without a burst."""
        if on and not self.above:
            return self.credit_s > self._least_s(suspend_s) + little_s
        return self.credit_s >= self.frame_credit_s - little_s

    def changes_s(self, now_s: float, pace: float, suspend_s: float, *, on: bool) -> float:
        """When `lasts` changes, if nothing else does; inf = never."""
        if self.above:
            return now_s + (self.frame_credit_s - self.credit_s) / self.part
        costs = pace - self.part  # a second
        return now_s + (self.credit_s - self._least_s(suspend_s)) / costs if on and costs > 0 else inf

    def owe(self, paid_s: float, most_s: float) -> None:
        """Pay for time that was not enforced: at most `most_s` of debt follow from it."""
        least_s = min(self.credit_s, -most_s)
        self.credit_s = max(self.credit_s - paid_s, least_s)

    def _least_s(self, suspend_s: float) -> float:
        """The credit that ends a run. Of a guarantee that earns less than two suspends in a frame, half of that: it would never begin one else."""
        return min(suspend_s, self.frame_credit_s / 2)

"""What was worked out for each node, kept until the node changes.

Between two pods of one template few nodes change. So what a policy worked out for all of them at the one is kept with the arrays that it
was worked out from; at the next the arrays are compared, which is quick, and the work is done again for the nodes that differ. Where the fleet
says which nodes changed (`cards.FollowedCards`) no arrays are kept nor compared. The answer is what all the work would give: the work has to give each node the same, whichever others are beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import numpy.typing as npt

from vgpu.cards import Cards, Columns, FollowedCards, Judged

KINDS: Final = 16
"""Of pods for which it is kept, the last ones: 0.8 MiB each for 10,000 nodes with 8 GPUs. Guessed."""

Floats = npt.NDArray[np.float32]
Work = Callable[[Cards], Floats]


@dataclass(frozen=True, slots=True)
class _Kept:
    cards: Cards
    values: Floats


class Recall:
    """For one kind of work."""

    def __init__(self) -> None:
        self._kept: dict[Hashable, _Kept] = {}
        """The ones used last at the end."""
        self._followed: dict[Hashable, tuple[int, Floats]] = {}
        """The same, of cards that are followed: the moment, and what the work gave then."""

    def __len__(self) -> int:
        return len(self._kept) + len(self._followed)

    def forget(self) -> None:
        """The work would give something else now."""
        self._kept.clear()
        self._followed.clear()

    def of(self, kind: Hashable, cards: Judged, work: Work) -> Floats:
        """(..., nodes) what `work` gives for these. Not to be written to. `kind`: the pods for which nodes are much the same again."""
        return self._compared(kind, cards, work) if isinstance(cards, Cards) else self._following(kind, cards, work)

    def _following(self, kind: Hashable, cards: FollowedCards, work: Work) -> Floats:
        """Which ones changed is known."""
        moment, values = self._followed.pop(kind, (-1, None))
        if values is None or values.shape[-1] != len(cards.changed):
            values = work(cards.at(np.arange(len(cards.changed))))
        elif len(changed := np.flatnonzero(cards.changed > moment)):
            values = values.copy()
            values[..., changed] = work(cards.at(changed))
        self._followed[kind] = cards.moment, values
        if len(self._followed) > KINDS:
            del self._followed[next(iter(self._followed))]
        return values

    def _compared(self, kind: Hashable, cards: Cards, work: Work) -> Floats:
        kept = self._kept.pop(kind, None)
        if kept is None or kept.cards.free_mib.shape != cards.free_mib.shape:
            values = work(cards)
        else:
            changed = np.flatnonzero(_differ(kept.cards, cards))
            if 2 * len(changed) > kept.values.shape[-1]:
                values = work(cards)
            elif len(changed):
                values = kept.values.copy()
                values[..., changed] = work(_at(cards, changed))
            else:
                self._kept[kind] = kept
                return kept.values
        self._kept[kind] = _Kept(self._own(cards), values)
        if len(self._kept) > KINDS:
            del self._kept[next(iter(self._kept))]
        return values

    def _own(self, cards: Cards) -> Cards:
        """With arrays that nobody writes to, shared with the last one's where these are equal."""
        total, model = cards.total_mib, cards.model
        last = next(reversed(self._kept.values()), None)
        same = (
            last is not None and np.array_equal(last.cards.total_mib, total) and np.array_equal(last.cards.model, model)
        )
        if last is not None and same:
            total, model = last.cards.total_mib, last.cards.model
        else:
            model = model.copy()
        return replace(
            cards, free_percent=cards.free_percent.copy(), total_mib=total, model=model, cpu_milli=cards.cpu_milli.copy()
        )  # fmt: skip


def _differ(one: Cards, other: Cards) -> npt.NDArray[np.bool_]:
    """(nodes,)"""
    by_card = one.free_mib != other.free_mib
    by_card |= one.free_percent != other.free_percent
    by_card |= one.total_mib != other.total_mib
    by_card |= one.model != other.model
    differ: npt.NDArray[np.bool_] = by_card.any(axis=0) | (one.cpu_milli != other.cpu_milli)
    return differ


def _at(cards: Cards, nodes: Columns) -> Cards:
    return replace(
        cards, free_mib=cards.free_mib.take(nodes, axis=1), free_percent=cards.free_percent.take(nodes, axis=1),
        total_mib=cards.total_mib.take(nodes, axis=1), model=cards.model.take(nodes, axis=1),
        cpu_milli=cards.cpu_milli[nodes],
    )  # fmt: skip

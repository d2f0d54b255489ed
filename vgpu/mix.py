"""What the cluster's pods ask for, and how much of an idle card such pods could not use.

Learnt from the pods seen, each as often as it was seen; nothing is assumed before. The typical asks are the most frequent ones
up to `SHARE` of the pods. They are made into tables once in a while, so that judging 10,000 nodes is a look-up by card.

An ask cannot use a card with too little memory or compute time free, one of a model that it does not allow, any card of a node
with too little CPU, nor any of a node with fewer such cards than it wants. The result is in GPUs: a card idle by half and of no
use to anybody counts 0.5. (F of FGD, Weng et al., USENIX ATC '23, with expected shares of cards.)

Beside that, `stranded` looks further ahead: idle GPUs of a node beyond those that its free CPU serves when pods ask for as much
CPU to a GPU as they do on average. F sees a lack of CPU only when it is there. And `displaced` counts the GPUs that a pod takes by how
scarce their model is (`displacement`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

from vgpu.displacement import Demand, Need
from vgpu.recall import Recall
from vgpu.request import FULL_CORE_PERCENT, PodAsk

if TYPE_CHECKING:
    from vgpu.capacity import Capacity
    from vgpu.outcome import Cards

SHARE: Final = 0.95
"""Part of the pods that typical asks make up. From the paper."""
MOST_ASKS: Final = 64
"""Typical asks at most. Pulled out of the air: bounds the tables."""
LEARN_EVERY: Final = 256
"""Pods seen between two makings of the tables; more often at the beginning, at every power of two."""

FORGET_AT: Final = 65_536
"""Pods counted at which all counts are halved: what pods asked for long ago counts less and less, and rare asks are forgotten. Guessed."""

Floats = npt.NDArray[np.float32]
Indices = npt.NDArray[np.intp]


@dataclass(frozen=True, slots=True, order=True)
class Typical:
    """An ask as far as the measure knows it."""

    cards: int
    """0: no GPU, so it can use none."""
    mib: int
    """On each card; -1: the card must be whole."""
    percent: int
    cpu_milli: int
    models: tuple[str, ...]
    """Allowed; empty: any."""


@dataclass(frozen=True, slots=True)
class _Tables:
    mib: npt.NDArray[np.int64]
    percent: npt.NDArray[np.int64]
    cpu: npt.NDArray[np.int64]
    """Distinct needs, ascending."""
    useless: Floats
    """[CPU level, model, card level] how probably the next ask cannot use the card, seen alone."""
    asked_cpu_milli: float
    asked_mib: float
    asked_whole: float
    """Of the typical pods that ask for GPUs, expected: CPU, MiB of shares, cards taken whole."""
    demand: Demand
    """Of all pods seen, the rare ones too: a rare model may be asked for by few."""
    sets: tuple[tuple[int, Floats, npt.NDArray[np.bool_]], ...]
    """Of asks for several cards: cards, probability by [CPU level, model], whether a card is usable by [card level]."""


@dataclass
class Mix:
    """Counts the asks seen, and judges cards by them."""

    seen: Counter[Typical] = field(default_factory=Counter)
    pods: int = 0
    _tables: _Tables | None = None
    _due: bool = False
    _models: dict[str, int] = field(default_factory=dict)
    _models_then: dict[str, int] = field(default_factory=dict)
    _recall: Recall = field(default_factory=Recall, compare=False)

    def saw(self, ask: PodAsk, models: dict[str, int]) -> None:
        """Count a pod. `models` is the fleet's own table of codes."""
        self.seen[typical(ask)] += 1
        self.pods += 1
        self._models = models
        often = self.pods < LEARN_EVERY and self.pods & (self.pods - 1) == 0
        self._due |= often or self.pods % LEARN_EVERY == 0
        if self.pods >= FORGET_AT:
            self.seen = Counter({one: times // 2 for one, times in self.seen.items() if times > 1})
            self.pods = sum(self.seen.values())

    def restore(self, seen: Mapping[Typical, int], models: dict[str, int]) -> None:
        """Go on from what another has seen. `models` as for `saw`."""
        self.seen, self.pods, self._models, self._due = Counter(seen), sum(seen.values()), models, True

    def renew(self) -> None:
        """Make the tables anew before they are looked at next: they then follow from `seen` alone."""
        self._due = True

    def _known(self) -> _Tables | None:
        """The tables, made anew if that is due: only who looks at them pays."""
        if self._due or self._models_then != self._models:
            self._models_then, self._due = dict(self._models), False
            self._tables = _tables(self.typical(), self._demand(), self._models_then) if self.pods else None
            self._recall.forget()
        return self._tables

    def typical(self) -> dict[Typical, float]:
        """The typical asks and how probable each is."""
        chosen: dict[Typical, int] = {}
        for one, times in sorted(self.seen.items(), key=lambda item: (-item[1], item[0])):
            if sum(chosen.values()) >= SHARE * self.pods or len(chosen) == MOST_ASKS:
                break
            chosen[one] = times
        return {one: times / sum(chosen.values()) for one, times in chosen.items()}

    def _demand(self) -> Demand:
        needs = Counter[Need]()
        for one, times in self.seen.items():
            if one.cards:
                needs[Need(one.mib, one.percent, one.models)] += times * one.cards
        return Demand.of(needs, self._models_then)

    def displaced(self, before: Cards, after: Cards, capacity: Capacity) -> Floats:
        """(nodes,) GPUs of room for the asks to come that the pod takes, where `capacity` is what the whole fleet has free."""
        known = self._known()
        if known is None:
            return np.zeros(before.free_mib.shape[1], np.float32)
        by_mib = known.demand.displaced(capacity) / np.maximum(capacity.gpu_mib(), 1)
        by_model = np.append(by_mib, 0.0).astype(np.float32)  # the last is that of rows without a card, which are -1
        taken: Floats = ((before.free_mib - after.free_mib) * by_model[before.model]).sum(axis=0)
        return taken

    def unusable(self, cards: Cards, kind: Hashable = None) -> Floats:
        """(nodes,) GPUs that are idle and of no use to the next ask, expected. Not to be written to. `kind`: as in `Recall.of`."""
        return self.wasted(cards, kind)[0]

    def wasted(self, cards: Cards, kind: Hashable = None) -> tuple[Floats, Floats]:
        """(nodes,) twice: `unusable`, and stranded: GPUs that are idle and that the node's CPU will not suffice for, 0 where nobody told of
        the CPU."""
        known = self._known()
        nothing = np.zeros(cards.free_mib.shape[1], np.float32)
        if known is None:
            return nothing, nothing
        unusable, idle = self._recall.of(kind, cards, partial(_judge, known))
        if not known.asked_cpu_milli:
            return unusable, nothing
        there = cards.total_mib > 0
        card_mib = float(cards.total_mib.sum()) / int(np.count_nonzero(there)) if there.any() else 1.0
        milli_per_gpu = known.asked_cpu_milli / (known.asked_mib / card_mib + known.asked_whole)
        return unusable, np.maximum(0, idle - cards.cpu_milli / np.float32(milli_per_gpu))


def _judge(known: _Tables, cards: Cards) -> Floats:
    """(2, nodes) GPUs that are idle and of no use to the next ask, expected; and GPUs that are idle."""
    cpu = np.searchsorted(known.cpu, cards.cpu_milli, side="right")
    level = _level(known, cards)
    idle = np.maximum(cards.free_mib, 0) / np.maximum(cards.total_mib, 1).astype(np.float32)
    wasted = _over_cards(idle * known.useless[cpu, cards.model, level])
    for wanted, probable, usable in known.sets:
        can = usable[level]
        too_few = np.count_nonzero(can & (cards.total_mib > 0), axis=0) < wanted
        wasted += _over_cards(idle * can) * too_few * probable[cpu, cards.model[0]]
    judged: Floats = np.stack((wasted, _over_cards(idle)))
    return judged


def _over_cards(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """(nodes,) sums, added up card by card: numpy's own order, and with it the last digit, may differ with the number of nodes."""
    total: npt.NDArray[Any] = np.zeros_like(values[0])
    for row in values:
        total += row
    return total


def typical(ask: PodAsk) -> Typical:
    """What the measure knows of a pod: its largest ask for shares or whole cards."""
    parts = [part for part in ask.containers if part.kind != "mig"]
    largest = max(parts, key=lambda part: (part.kind == "whole", part.cards, part.mib), default=None)
    models = tuple(sorted(ask.models - ask.not_models))
    if largest is None:
        return Typical(0, 0, 0, ask.cpu_milli, models)
    whole = largest.kind == "whole"
    return Typical(
        largest.cards, -1 if whole else largest.mib, FULL_CORE_PERCENT if whole else largest.core_percent,
        ask.cpu_milli, models,
    )  # fmt: skip


def _level(known: _Tables, cards: Cards) -> Indices:
    """(cards, nodes) the level of each card: by memory, compute time, and whether it is whole."""
    by_mib = np.searchsorted(known.mib, cards.free_mib, side="right")
    whole = (cards.free_mib == cards.total_mib) & (cards.total_mib > 0)
    if len(known.percent) == 1 and known.percent[0] == 0:
        by_percent: Any = 1  # nobody asks for compute time
    else:
        by_percent = np.searchsorted(known.percent, cards.free_percent, side="right")
        whole &= cards.free_percent == FULL_CORE_PERCENT
    level: Indices = (by_mib * (len(known.percent) + 1) + by_percent) * 2 + whole
    return level


def _tables(asks: dict[Typical, float], demand: Demand, models: dict[str, int]) -> _Tables:
    mib, percent, cpu = (
        np.unique(np.array([getattr(one, what) for one in asks], np.int64)) for what in ("mib", "percent", "cpu_milli")
    )
    at_mib, at_percent, whole = np.meshgrid(
        np.arange(len(mib) + 1), np.arange(len(percent) + 1), np.arange(2), indexing="ij"
    )
    levels = at_mib.size
    useless = np.zeros((len(cpu) + 1, len(models) + 1, levels), np.float32)
    sets = []
    for one, probability in asks.items():
        allowed = np.array([not one.models or model in one.models for model in models] + [False])
        enough_cpu = np.arange(len(cpu) + 1) > np.searchsorted(cpu, one.cpu_milli)
        reachable = enough_cpu[:, np.newaxis] & allowed
        usable = (at_mib > np.searchsorted(mib, one.mib)) & (at_percent > np.searchsorted(percent, one.percent))
        usable = ((usable & ((one.mib >= 0) | (whole == 1))) if one.cards else np.zeros_like(usable)).reshape(-1)
        useless += np.float32(probability) * ~(reachable[:, :, np.newaxis] & usable)
        if one.cards > 1:
            sets.append((one.cards, (probability * reachable).astype(np.float32), usable))
    asking = [(one, probability) for one, probability in asks.items() if one.cards]
    return _Tables(
        mib,
        percent,
        cpu,
        useless,
        asked_cpu_milli=sum(probability * one.cpu_milli for one, probability in asking),
        asked_mib=sum(probability * one.cards * one.mib for one, probability in asking if one.mib >= 0),
        asked_whole=sum(probability * one.cards for one, probability in asking if one.mib < 0),
        demand=demand,
        sets=_merged(sets),
    )


def _merged(
    sets: list[tuple[int, Floats, npt.NDArray[np.bool_]]],
) -> tuple[tuple[int, Floats, npt.NDArray[np.bool_]], ...]:
    """Sets that want the same of the same cards, as one."""
    merged: dict[tuple[int, bytes], tuple[int, Floats, npt.NDArray[np.bool_]]] = {}
    for wanted, probable, usable in sets:
        key = (wanted, usable.tobytes())
        merged[key] = (wanted, merged[key][1] + probable if key in merged else probable, usable)
    return tuple(merged.values())

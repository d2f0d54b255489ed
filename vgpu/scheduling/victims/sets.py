"""The cheapest set of some pods whose eviction suffices.

Up to `EXACT` pods it is the cheapest of all sets. Of more, a set is found of which no pod could stay: all leave, and each may stay, the
most important first, where the rest still suffices. Then it is compared with all sets that differ from it in `EXACT` pods alone, some that leave and
some that free most of what is short, again and again. It had at most one pod more than the cheapest of all sets in 10,000 random cases
(tests/unit/vgpu/scheduling/victims/test_sets.py).

Shapes
    sets       (sets, pods) of 0 and 1, a row for each set
    amounts    (pods, dimensions) what each pod frees; demand (dimensions,) is what must be freed
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

from vgpu.api.names import CLASSES
from vgpu.scheduling.victims.eligibility import LOWEST, AllocatedPod
from vgpu.scheduling.victims.eviction_cost import cost_of, violates_surely, violations_of

EXACT: Final = 12
"""Pods of which every set counts: 4,096 sets, half a millisecond. GPUs are shared by fewer as a rule."""

ROUNDS: Final = 3
"""Of changes to a set of more pods, unless none made it cheaper. Guessed; the third hardly ever does."""

BITS: Final = 62
"""Of a number that is exact, and does not overflow as several are added up."""

Sets: TypeAlias = npt.NDArray[np.int64]
Suffices: TypeAlias = Callable[[Sets], npt.NDArray[np.bool_]]
"""(sets, pods) -> (sets,). If it is true of a set it must be of every larger one."""


def covers(amounts: npt.NDArray[np.int64], demand: npt.NDArray[np.int64]) -> Suffices:
    """Does a set free as much as is demanded, in every dimension?"""

    def suffices(sets: Sets) -> npt.NDArray[np.bool_]:
        enough: npt.NDArray[np.bool_] = np.all(sets @ amounts >= demand, axis=1)
        return enough

    return suffices


def least_set(
    pods: Sequence[AllocatedPod],
    suffices: Suffices,
    shares: npt.NDArray[np.float64],
    headroom: Mapping[str, int],
    *,
    violate: bool,
) -> Generator[None, None, tuple[AllocatedPod, ...] | None]:
    """None when no set suffices. `shares` (pods, dimensions): how much of what is short each frees, which matters where there are more than
    `EXACT`. Without `violate` a set that goes beyond a budget does not count. Yields after some milliseconds of work."""
    if not violate:
        kept = [at for at, one in enumerate(pods) if not violates_surely(one, headroom)]
        if len(kept) < len(pods):
            pods, shares, suffices = [pods[at] for at in kept], shares[kept], _among(suffices, kept, len(pods))
    if len(pods) > EXACT:
        return (yield from _of_many(pods, suffices, shares, headroom, violate=violate))
    return least_of_all(pods, suffices, headroom, violate=violate)


def least_of_all(
    pods: Sequence[AllocatedPod], suffices: Suffices, headroom: Mapping[str, int], *, violate: bool
) -> tuple[AllocatedPod, ...] | None:
    """The cheapest of all sets: 2 to the power of the number of pods."""
    sets = _every_set(len(pods))
    going = _cheapest(pods, sets[suffices(sets)], headroom)
    best = None if going is None else tuple(pods[at] for at in going)
    return None if best is None or (not violate and violations_of(best, headroom)) else best


@lru_cache(maxsize=EXACT + 1)
def _every_set(count: int) -> Sets:
    return (np.arange(1 << count)[:, np.newaxis] >> np.arange(count)) & 1


def _among(suffices: Suffices, kept: Sequence[int], count: int) -> Suffices:
    """The same, of the pods kept out of so many."""

    def requested(sets: Sets) -> npt.NDArray[np.bool_]:
        whole = np.zeros((len(sets), count), np.int64)
        whole[:, kept] = sets
        return suffices(whole)

    return requested


def _cheapest(pods: Sequence[AllocatedPod], sets: Sets, headroom: Mapping[str, int]) -> list[int] | None:
    """Of these sets, by one key of the cost after the other. Returns the victims; None if there is no set."""
    if not len(sets):
        return None
    for key in _keys(pods, headroom):
        if len(sets) == 1:
            break
        sets = _lowest(key(sets), sets)
    return np.flatnonzero(sets[0]).tolist()


def _lowest(key: npt.NDArray[np.int64], sets: Sets) -> Sets:
    lowest: Sets = sets[key == key.min()]
    return lowest


_Key: TypeAlias = Callable[[Sets], npt.NDArray[np.int64]]


def _keys(pods: Sequence[AllocatedPod], headroom: Mapping[str, int]) -> Iterator[_Key]:
    """The first is tried first; those after it are seldom needed."""
    yield _beyond(pods, headroom)
    for service_class in CLASSES[:2]:
        yield _of_class(pods, service_class)
    yield _highest(pods)
    yield _count
    yield from _youth(pods)
    yield from _names(pods)


def _beyond(pods: Sequence[AllocatedPod], headroom: Mapping[str, int]) -> _Key:
    """Evictions beyond what budgets allow."""
    budgets = sorted({budget for one in pods for budget in one.budgets})
    members = np.array([[budget in one.budgets for budget in budgets] for one in pods], np.int64)
    allowed = np.array([max(0, headroom.get(budget, 0)) for budget in budgets], np.int64)
    return lambda sets: np.maximum(0, sets @ members.reshape(len(pods), -1) - allowed).sum(axis=1)


def _of_class(pods: Sequence[AllocatedPod], service_class: str) -> _Key:
    return lambda sets: sets @ np.array([one.service_class == service_class for one in pods], np.int64)


def _highest(pods: Sequence[AllocatedPod]) -> _Key:
    priorities = np.array([one.priority for one in pods], np.int64)
    return lambda sets: np.where(sets == 1, priorities, LOWEST).max(axis=1, initial=LOWEST)


def _count(sets: Sets) -> npt.NDArray[np.int64]:
    count: npt.NDArray[np.int64] = sets.sum(axis=1)
    return count


def _youth(pods: Sequence[AllocatedPod]) -> list[_Key]:
    """Of sets of one size: the more of them started late the better, the oldest first."""
    times = sorted({one.started for one in pods})
    return _digits([times.index(one.started) for one in pods], len(times))


def _names(pods: Sequence[AllocatedPod]) -> list[_Key]:
    """Of sets of one size: the more of them have small names the better, the smallest first."""
    names = sorted(one.uid for one in pods)
    return [_negative(key) for key in _digits([names.index(one.uid) for one in pods], len(names))]


def _digits(ranks: Sequence[int], count: int) -> list[_Key]:
    """Numbers with a digit for each of so many ranks, the first one first: how many of a set have it. As many as fit into a number."""
    base = len(ranks) + 2  # one would do, but for no pods at all
    most = max(1, int(BITS / math.log2(base)))
    return [_digit(ranks, base, range(first, min(count, first + most))) for first in range(0, count, most)]


def _digit(ranks: Sequence[int], base: int, places: range) -> _Key:
    values = np.array([base ** (places.stop - 1 - rank) if rank in places else 0 for rank in ranks], np.int64)
    return lambda sets: sets @ values


def _negative(key: _Key) -> _Key:
    return lambda sets: -key(sets)


def give_back(pods: Sequence[AllocatedPod], suffices: Suffices, headroom: Mapping[str, int]) -> list[int] | None:
    """All leave; then each may stay, the most important first, where the rest suffices. Returns the victims; None if all are too few."""
    going = np.ones((1, len(pods)), np.int64)
    if not suffices(going)[0]:
        return None
    for at in sorted(range(len(pods)), key=lambda at: cost_of("", [pods[at]], headroom), reverse=True):
        going[0, at] = 0
        if not suffices(going)[0]:
            going[0, at] = 1
    return np.flatnonzero(going[0]).tolist()


def _of_many(
    pods: Sequence[AllocatedPod],
    suffices: Suffices,
    shares: npt.NDArray[np.float64],
    headroom: Mapping[str, int],
    *,
    violate: bool,
) -> Generator[None, None, tuple[AllocatedPod, ...] | None]:
    going = give_back(pods, suffices, headroom)
    if going is None:
        return None
    size = np.minimum(shares, 1.0)
    for _ in range(ROUNDS):
        before = going
        for order in _orders(pods, size, headroom):
            for some in _windows(order, going):
                yield
                going = _changed(pods, going, some, suffices, headroom)
        if going == before:
            break
    best = tuple(pods[at] for at in going)
    return None if not violate and violations_of(best, headroom) else best


def _changed(
    pods: Sequence[AllocatedPod],
    going: Sequence[int],
    some: Sequence[int],
    suffices: Suffices,
    headroom: Mapping[str, int],
) -> list[int]:
    """The cheapest set that differs from these victims in these pods alone."""
    sets = np.zeros((1 << len(some), len(pods)), np.int64)
    sets[:, going] = 1
    sets[:, some] = _every_set(len(some))
    best = _cheapest(pods, sets[suffices(sets)], headroom)
    return list(going) if best is None else best


def _orders(
    pods: Sequence[AllocatedPod], size: npt.NDArray[np.float64], headroom: Mapping[str, int]
) -> list[list[int]]:
    """The pods by how much they free for their cost, in several orders."""
    weight = [cost_of("", [one], headroom)[:4] for one in pods]
    together, indices = size.sum(axis=1), range(len(pods))
    return [
        sorted(indices, key=lambda at: (weight[at], -together[at])),
        sorted(indices, key=lambda at: (-together[at], weight[at])),
        *(sorted(indices, key=lambda at: (-size[at, by], weight[at])) for by in range(size.shape[1])),
    ]


def _windows(order: Sequence[int], going: Sequence[int]) -> Iterator[list[int]]:
    """`EXACT` pods at a time, some that go and some that stay."""
    staying = [at for at in order if at not in going]
    leaving = [at for at in reversed(order) if at in going]
    half = EXACT // 2
    for first in range(0, max(1, len(leaving)), half):
        some = leaving[first : first + half]
        yield some + staying[: EXACT - len(some)]

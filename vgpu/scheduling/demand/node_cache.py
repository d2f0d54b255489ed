"""What was worked out for each node, kept until the node changes.

Between two pods of one template few nodes change. So what a policy worked out for all of them at the one is kept with the arrays that it
was worked out from; at the next the arrays are compared, which is quick, and the work is done again for the nodes that differ. Where the fleet
reports which nodes changed (`arrays.FollowedGpus`) no arrays are kept nor compared. The result equals that of all
the work: the work must give each node the same, whichever others are beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import numpy.typing as npt

from vgpu.scheduling.arrays import Columns, FollowedGpus, GpuArrays, GpusOfNodes

KINDS: Final = 16
"""Of pods for which it is kept, the last ones: 0.8 MiB each for 10,000 nodes with 8 GPUs. Guessed."""

Floats = npt.NDArray[np.float32]
Work = Callable[[GpuArrays], Floats]


@dataclass(frozen=True, slots=True)
class _Cached:
    gpus: GpuArrays
    values: Floats


class NodeCache:
    """For one kind of work."""

    def __init__(self) -> None:
        self._kept: dict[Hashable, _Cached] = {}
        """The ones used last at the end."""
        self._followed: dict[Hashable, tuple[int, Floats]] = {}
        """The same, of GPUs that are followed: the moment, and what the work gave then."""

    def __len__(self) -> int:
        return len(self._kept) + len(self._followed)

    def forget(self) -> None:
        """The work would give something else now."""
        self._kept.clear()
        self._followed.clear()

    def of(self, kind: Hashable, gpus: GpusOfNodes, work: Work) -> Floats:
        """(..., nodes) what `work` gives for these. Not to be written to. `kind`: the pods for which nodes are much the same again."""
        return self._compared(kind, gpus, work) if isinstance(gpus, GpuArrays) else self._following(kind, gpus, work)

    def _following(self, kind: Hashable, gpus: FollowedGpus, work: Work) -> Floats:
        """Which ones changed is known."""
        moment, values = self._followed.pop(kind, (-1, None))
        if values is None or values.shape[-1] != len(gpus.changed):
            values = work(gpus.at(np.arange(len(gpus.changed))))
        elif len(changed := np.flatnonzero(gpus.changed > moment)):
            values = values.copy()
            values[..., changed] = work(gpus.at(changed))
        self._followed[kind] = gpus.moment, values
        if len(self._followed) > KINDS:
            del self._followed[next(iter(self._followed))]
        return values

    def _compared(self, kind: Hashable, gpus: GpuArrays, work: Work) -> Floats:
        kept = self._kept.pop(kind, None)
        if kept is None or kept.gpus.free_mib.shape != gpus.free_mib.shape:
            values = work(gpus)
        else:
            changed = np.flatnonzero(_differ(kept.gpus, gpus))
            if 2 * len(changed) > kept.values.shape[-1]:
                values = work(gpus)
            elif len(changed):
                values = kept.values.copy()
                values[..., changed] = work(_at(gpus, changed))
            else:
                self._kept[kind] = kept
                return kept.values
        self._kept[kind] = _Cached(self._own(gpus), values)
        if len(self._kept) > KINDS:
            del self._kept[next(iter(self._kept))]
        return values

    def _own(self, gpus: GpuArrays) -> GpuArrays:
        """With arrays that are not written to, shared with the last one's where these are equal."""
        total, model = gpus.total_mib, gpus.model
        last = next(reversed(self._kept.values()), None)
        same = (
            last is not None and np.array_equal(last.gpus.total_mib, total) and np.array_equal(last.gpus.model, model)
        )
        if last is not None and same:
            total, model = last.gpus.total_mib, last.gpus.model
        else:
            model = model.copy()
        return replace(
            gpus, free_percent=gpus.free_percent.copy(), total_mib=total, model=model, cpu_milli=gpus.cpu_milli.copy()
        )  # fmt: skip


def _differ(one: GpuArrays, other: GpuArrays) -> npt.NDArray[np.bool_]:
    """(nodes,)"""
    by_gpu = one.free_mib != other.free_mib
    by_gpu |= one.free_percent != other.free_percent
    by_gpu |= one.total_mib != other.total_mib
    by_gpu |= one.model != other.model
    differ: npt.NDArray[np.bool_] = by_gpu.any(axis=0) | (one.cpu_milli != other.cpu_milli)
    return differ


def _at(gpus: GpuArrays, nodes: Columns) -> GpuArrays:
    return replace(
        gpus, free_mib=gpus.free_mib.take(nodes, axis=1), free_percent=gpus.free_percent.take(nodes, axis=1),
        total_mib=gpus.total_mib.take(nodes, axis=1), model=gpus.model.take(nodes, axis=1),
        cpu_milli=gpus.cpu_milli[nodes],
    )  # fmt: skip

"""Write filter's answers: in a full cluster each names every node, with the reason why not, 1 MB for 10,000.

kube-scheduler needs each of them. A node that is missing counts as one where no eviction helps, without a reason: it would evict no pod for the
request, and its Event would not count the node. Most nodes have the same reason from call to call, so the text of all nodes with that
reason is kept, and an answer is cut from it: 0.1 ms instead of 2 (measured). Which nodes an answer names is decided in each call.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Final

import msgspec
import numpy as np
import numpy.typing as npt

from extender.protocol import FilterResult, members
from vgpu.scheduling.nodes.nodes_by_column import NodesByColumn

KEPT: Final = 8
"""Reasons whose text is kept, those used last: 1 MB each for 10,000 nodes. `placement` has as many that evictions or an empty node decide."""

FEW: Final = 8
"""A reason that applies to less than one node in so many is written out: it takes less time than to make the text. Guessed."""


@dataclass(frozen=True, slots=True)
class _Text:
    """`"node":"reason",` of every column."""

    text: memoryview
    starts: npt.NDArray[np.int64]
    """(columns + 1,) where each begins, and where the last ends."""

    def cut(self, columns: npt.NDArray[np.intp]) -> list[memoryview]:
        """The parts for these columns, one or more: together they are the members of a JSON object, without a comma at the end."""
        breaks = np.flatnonzero(np.diff(columns) != 1)
        firsts, lasts = columns[np.append(0, breaks + 1)], columns[np.append(breaks, len(columns) - 1)]
        begins, ends = self.starts[firsts], self.starts[lasts + 1]
        ends[-1] -= len(b",")
        return [self.text[begin:end] for begin, end in zip(begins.tolist(), ends.tolist(), strict=True)]


class FilterAnswers:
    """Writes results as `FilterResult.to_json` does; members of an object may stand in another order."""

    def __init__(self) -> None:
        self._every: tuple[str, ...] = ()
        self._texts: dict[str, _Text] = {}
        """Reason -> its text, for the nodes in `_every`."""

    def __len__(self) -> int:
        """Reasons whose text is kept."""
        return len(self._texts)

    def encode(self, result: FilterResult) -> bytes:
        """As the scheduler reads it."""
        parts: list[bytes | memoryview] = [
            b'{"NodeNames":',
            msgspec.json.encode(list(result.node_names)),
            b',"FailedNodes":',
        ]
        parts += self._object(result.failed)
        parts.append(b',"FailedAndUnresolvableNodes":')
        parts += self._object(result.unresolvable)
        return b"".join([*parts, b',"Error":', msgspec.json.encode(result.error), b"}"])

    def _object(self, reasons: Mapping[str, Sequence[str]]) -> list[bytes | memoryview]:
        parts: list[bytes | memoryview] = [b"{"]
        for reason, nodes in reasons.items():
            if len(nodes):
                parts += [b","] * (len(parts) > 1)
                parts += self._members(reason, nodes)
        parts.append(b"}")
        return parts

    def _members(self, reason: str, nodes: Sequence[str]) -> Sequence[bytes | memoryview]:
        if not isinstance(nodes, NodesByColumn) or FEW * len(nodes) < len(nodes.every):
            return [members(reason, nodes)]
        if nodes.every is not self._every:
            self._every = nodes.every
            self._texts.clear()
        text = self._texts.pop(reason, None) or _text_of(reason, nodes.every)
        self._texts[reason] = text  # the last that is removed
        if len(self._texts) > KEPT:
            del self._texts[next(iter(self._texts))]
        return text.cut(nodes.columns)


def _text_of(reason: str, every: tuple[str, ...]) -> _Text:
    ending = b":" + msgspec.json.encode(reason) + b","
    written = [msgspec.json.encode(name) + ending for name in every]
    return _Text(
        memoryview(b"".join(written)), np.fromiter(accumulate(map(len, written), initial=0), np.int64, len(written) + 1)
    )

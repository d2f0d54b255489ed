"""Labels of the fleet's nodes, as numbers by column: a pod's preferences for its node are then a look-up over all nodes at once.

Only keys that are looked up become arrays, at the first look-up. A node's labels outlive its column: a node that leaves the
fleet and comes back finds its labels again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

Codes = npt.NDArray[np.int32]

MOST_KEYS: Final = 256
"""Keys kept as arrays; of more, the one that was not looked up for longest is dropped. Guessed: 10 MB for 10,000 nodes. To make one takes 0.4 ms there,
so a pod may not name more of them than this, by far."""

_NOTHING: Final[Mapping[str, str]] = {}


@dataclass(slots=True)
class Key:
    """One label key."""

    codes: Codes
    """(columns,) the number of each node's value; -1 where it has none."""
    numbers: dict[str, int]
    """Value -> its number. Values that no node has any more stay until the key is made anew."""


class Labels:
    """`column` is the fleet's own table of nodes, which reports changes by `settle`, `leave` and `grew`."""

    def __init__(self, column: Mapping[str, int]) -> None:
        self.column = column
        """Node -> its column."""
        self._labels: dict[str, Mapping[str, str]] = {}
        self._keys: dict[str, Key] = {}
        self._size = 0

    def set(self, node: str, labels: Mapping[str, str] | None) -> bool:
        """A node has these labels; None: it is gone. Returns whether it had others."""
        if self._labels.get(node) == labels:
            return False
        if labels is None:
            del self._labels[node]
        else:
            self._labels[node] = labels
        if node in self.column:
            self.settle(node)
        return True

    def settle(self, node: str) -> None:
        """A node has come to a column, or has other labels."""
        at, labels = self.column[node], self._labels.get(node, _NOTHING)
        for name, key in list(self._keys.items()):
            key.codes[at] = _number(key, labels.get(name))
            if len(key.numbers) > 2 * len(key.codes):
                del self._keys[name]

    def leave(self, at: int) -> None:
        """A column is empty."""
        for key in self._keys.values():
            key.codes[at] = -1

    def grew(self, size: int) -> None:
        """There are so many columns now."""
        self._size = size
        self._keys.clear()

    def key(self, name: str) -> Key:
        """A key, for all columns."""
        key = self._keys.pop(name, None)
        if key is None:
            if len(self._keys) >= MOST_KEYS:
                del self._keys[next(iter(self._keys))]
            key = Key(np.full(self._size, -1, np.int32), {})
            for node, at in self.column.items():
                key.codes[at] = _number(key, self._labels.get(node, _NOTHING).get(name))
        self._keys[name] = key  # the last that is removed
        return key


def _number(key: Key, value: str | None) -> int:
    return -1 if value is None else key.numbers.setdefault(value, len(key.numbers))

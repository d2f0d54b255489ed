"""Find thousands of names in a text at once, with the place of each in the fleet.

A scheduler names every node in every call, each time in another order: 10,000 names are 440 kB. Made into strings and looked up one by
one they take 4 ms, most of it waiting for memory. Here they stay the bytes that they are. Each is read as 64-bit words from its end
backwards; the words make a hash, the hash a place in a table, and the words are compared with those of the name that stands there, all
by array: 0.6 ms (measured). Nothing rests on hashes being different: a name is found when every byte is equal.

Text that is not plain (white space, escapes) is not for this: `find` answers None.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final, overload

import msgspec
import numpy as np
import numpy.typing as npt

Words = npt.NDArray[np.uint64]
Columns = npt.NDArray[np.intp]
Numbers = npt.NDArray[np.int32]

_QUOTE: Final = ord('"')
_WORD: Final = 8
_MASKS: Final = np.array([(2**64 - 1) ^ (2 ** (8 * (_WORD - kept)) - 1) for kept in range(_WORD + 1)], np.uint64)
"""By number of bytes kept of a word: those at its end in memory, which are the high ones of a little-endian word."""
_DISTRIBUTION: Final = np.uint64(0x9E3779B97F4A7C15)
_SPARE: Final = 32
"""Places in the table for each name, at least: all but some percent are found at the first (measured)."""


FEW_BYTES: Final = 1024
"""A list of names in so much text is read into strings and looked up one by one: the one node of a nominated pod takes 4 us so, and 60 the other way (measured)."""

_NAMES: Final = msgspec.json.Decoder(tuple[str, ...])


class Quoted(Sequence[str]):
    """The names in `text[start:end]`, the inside of a JSON list: `"a","b"`. Made into strings when a caller reads them as such.

    Reading them raises MsgspecError or UnicodeDecodeError where they are no list of strings.
    """

    def __init__(self, text: bytes, start: int, end: int) -> None:
        self.text, self.start, self.end = text, start, end
        self.looked_up: tuple[NameIndex, Found | None] | None = None
        """What a name index found of them last."""

    @cached_property
    def names(self) -> tuple[str, ...]:
        """All of them, as strings."""
        return _NAMES.decode(b"[%b]" % self.text[self.start : self.end])

    @property
    def names_few(self) -> bool:
        """Is it faster to read and look up each?"""
        return self.end - self.start <= FEW_BYTES

    def contains_literally(self, name: str) -> bool:
        """Whether this name stands there, searched for as it is: 7 us among 1,000 (measured). False too where an escape might hide it."""
        quoted = b'"%b"' % name.encode()
        return self.text.find(quoted, self.start, self.end) >= 0 and self.text.find(b"\\", self.start, self.end) < 0

    def __len__(self) -> int:
        return len(self.names)

    def __bool__(self) -> bool:
        """Whether there is any, without reading them."""
        return self.text.find(b'"', self.start, self.end) >= 0

    @overload
    def __getitem__(self, at: int) -> str: ...
    @overload
    def __getitem__(self, at: slice) -> tuple[str, ...]: ...
    def __getitem__(self, at: int | slice) -> str | tuple[str, ...]:
        return self.names[at]


@dataclass(frozen=True, slots=True, eq=False)
class Found:
    """What a text names."""

    columns: Columns
    """Of the names that are known, in their order."""
    unknown: tuple[str, ...]
    """Those that are not, in their order."""


class NameIndex:
    """Names and their columns at one moment."""

    def __init__(self, column: Mapping[str, int]) -> None:
        names = [name.encode() for name in column]
        self._columns: Columns = np.fromiter(column.values(), np.intp, len(names))
        self._lengths: Columns = np.fromiter(map(len, names), np.intp, len(names))
        self._text_bytes = int(self._lengths.sum()) + len(names) * len(b'"",')
        """Of a list of them all."""
        longest = -(-int(self._lengths.max(initial=0)) // _WORD) * _WORD
        packed = np.frombuffer(b"".join(name.rjust(longest, b"\0") for name in names), "<u8")
        self._words: list[Words] = [
            np.ascontiguousarray(row) for row in packed.reshape(len(names), longest // _WORD).T[::-1]
        ]
        """Per eight bytes from the end: the word of each name."""
        size = 1 << (_SPARE * len(names) + 1).bit_length()
        self._table: Numbers = np.full(size, -1, np.int32)
        self._last = np.uint64(size - 1)
        self._enter(_hash(self._words, self._lengths))

    @property
    def columns(self) -> Columns:
        """Of every name."""
        return self._columns

    def are_mostly_in(self, names: Quoted) -> bool:
        """Whether a text is long enough to have half of the names or more."""
        return 2 * (names.end - names.start) >= self._text_bytes

    def find(self, names: Quoted) -> Found | None:
        """Look them up. None when they are not plain. Raises as `names` does where one that is not known is no string."""
        if names.looked_up is None or names.looked_up[0] is not self:
            names.looked_up = self, self._find(names)
        return names.looked_up[1]

    def _find(self, names: Quoted) -> Found | None:
        text, cut = names.text, _cut(names.text, names.start, names.end)
        if cut is None:
            return None
        ends, lengths = cut
        words = self._read(text, ends, lengths)
        known = self._look_up(words, lengths)
        there = known >= 0
        if there.all():
            return Found(self._columns[known], ())
        firsts, lasts = (ends - lengths)[~there].tolist(), ends[~there].tolist()
        unknown = b",".join(text[first - 1 : last + 1] for first, last in zip(firsts, lasts, strict=True))
        return Found(self._columns[known[there]], Quoted(unknown, 0, len(unknown)).names)

    def _enter(self, hashes: Words) -> None:
        """Give each name a place in the table: its own, or the next that is free."""
        waiting, at = np.arange(len(hashes), dtype=np.int32), self._place(hashes)
        while len(waiting):
            free = self._table[at] < 0
            self._table[at[free]] = waiting[free]
            left = self._table[at] != waiting
            waiting, at = waiting[left], self._next(at[left])

    def _look_up(self, words: list[Words], lengths: Columns) -> Numbers:
        """(names,) the number of each name, -1 for those that are unknown."""
        if not len(self._columns):
            return np.full(len(lengths), -1, np.int32)
        at = self._place(_hash(words, lengths))
        found: Numbers = self._table[at]
        wrong = np.flatnonzero(~self._equal(found, words, lengths))
        while len(wrong):
            wrong = wrong[found[wrong] >= 0]
            at[wrong] = self._next(at[wrong])
            found[wrong] = self._table[at[wrong]]
            wrong = wrong[~self._equal(found[wrong], [word[wrong] for word in words], lengths[wrong])]
        return found

    def _equal(self, number: Numbers, words: list[Words], lengths: Columns) -> npt.NDArray[np.bool_]:
        """Whether each name is the one of this number. The last name stands for -1: what is answered of it means nothing."""
        equal: npt.NDArray[np.bool_] = self._lengths[number] == lengths
        for mine, theirs in zip(self._words, words, strict=True):
            equal &= mine[number] == theirs
        return equal

    def _read(self, text: bytes, ends: Columns, lengths: Columns) -> list[Words]:
        """As `_words`, of names in a text. Of those longer than any that is known, only the end is read."""
        everywhere: Words = np.ndarray((len(text) - _WORD + 1,), "<u8", text, 0, (1,))
        shortest, words = int(lengths.min()), []
        for at in range(0, _WORD * len(self._words), _WORD):
            if at + _WORD <= shortest:
                words.append(everywhere[ends - (at + _WORD)])
                continue
            word = np.zeros(len(ends), np.uint64)
            some = np.flatnonzero(lengths > at)
            kept = np.minimum(lengths[some] - at, _WORD)
            word[some] = everywhere[ends[some] - (at + _WORD)] & _MASKS[kept]
            words.append(word)
        return words

    def _place(self, hashes: Words) -> Columns:
        return (hashes & self._last).astype(np.intp)

    def _next(self, at: Columns) -> Columns:
        return (at + 1) & (len(self._table) - 1)


def _cut(text: bytes, start: int, end: int) -> tuple[Columns, Columns] | None:
    """(end, length) of every name, None when the text is not plain. `start` must be `_WORD` or more: words are read from before it."""
    if start < _WORD or text.find(b"\\", start, end) >= 0:
        return None
    quotes = np.flatnonzero(np.frombuffer(text, np.uint8, end - start, start) == _QUOTE)
    if not len(quotes) or len(quotes) % 2:
        return None
    opens, closes = quotes[::2], quotes[1::2]
    between = np.frombuffer(text, np.uint8, end - start, start)[closes[:-1] + 1]
    plain = opens[0] == 0 and closes[-1] == end - start - 1
    if not plain or (opens[1:] != closes[:-1] + 2).any() or (between != ord(",")).any():
        return None
    return closes + start, closes - opens - 1


def _hash(words: list[Words], lengths: Columns) -> Words:
    hashes: Words = lengths.astype(np.uint64)
    for word in words:
        hashes = (hashes ^ word) * _DISTRIBUTION
        hashes ^= hashes >> np.uint64(29)
    return hashes

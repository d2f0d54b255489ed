"""Which GPUs of a node are Tangram's: selectors, as an operator writes them. Pure.

    list      one or more selectors; a GPU is Tangram's if any of them matches it
    selector  terms joined by `&`; all of them must match
    term      all | uuid=UUID | index=N | index=N-M | model=PATTERN | label=KEY | label=KEY=VALUE

`*` in a PATTERN stands for any text, and case does not count. A label is one of the node: `label=pool=small & index=0-1` is the first two GPUs of each node
with that label. Spaces around `&` do not count.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from vgpu.api.inventory import Gpu
from vgpu.api.uuids import kind_of_uuid

ALLOWED: Final = "all, uuid=UUID, index=N, index=N-M, model=PATTERN, label=KEY or label=KEY=VALUE, joined by &"
MOST_SELECTORS: Final = 64
"""As many as a node may have GPUs (`MOST_GPUS_OF_A_NODE`)."""
EVERY: Final = "all"

_INDEX = re.compile(r"(\d{1,3})(?:-(\d{1,3}))?\Z")
_LABEL = re.compile(
    r"((?:[a-z0-9.-]{1,253}/)?[A-Za-z0-9](?:[A-Za-z0-9._-]{0,61}[A-Za-z0-9])?)(?:=([A-Za-z0-9._-]{0,63}))?\Z"
)

_Term = Callable[[Gpu, Mapping[str, str]], bool]


@dataclass(frozen=True, slots=True)
class Selection:
    """What a list of selectors says. `label_keys`: of node labels that it reads."""

    selectors: tuple[tuple[_Term, ...], ...]
    label_keys: frozenset[str] = frozenset()

    def has(self, gpu: Gpu, labels: Mapping[str, str]) -> bool:
        """Is this GPU Tangram's on a node with these labels?"""
        return any(all(term(gpu, labels) for term in terms) for terms in self.selectors)


def selection_from_list(selectors: Sequence[str]) -> Selection:
    """Raises ValueError that names the selector, the term and what is allowed."""
    if not 0 < len(selectors) <= MOST_SELECTORS:
        raise ValueError(
            f"the list has {len(selectors)} selectors: it must have 1 to {MOST_SELECTORS}; {EVERY} selects every GPU"
        )
    keys: set[str] = set()
    return Selection(tuple(_selector(one, keys) for one in selectors), frozenset(keys))


def _selector(text: str, keys: set[str]) -> tuple[_Term, ...]:
    return tuple(_term(part.strip(), text, keys) for part in text.split("&"))


def _term(term: str, selector: str, keys: set[str]) -> _Term:
    kind, _, value = term.partition("=")
    if term == EVERY:
        return lambda _, __: True
    if kind == "uuid" and kind_of_uuid(value) == "GPU":
        return lambda gpu, _: gpu.uuid == value
    if kind == "index" and (found := _INDEX.match(value)):
        first, last = int(found[1]), int(found[2] or found[1])
        if first <= last:
            return lambda gpu, _: first <= gpu.index <= last
    if kind == "model" and value:
        pattern = re.compile(_any_text(value.split("*")), re.IGNORECASE | re.DOTALL)
        return lambda gpu, _: pattern.match(gpu.model) is not None
    if kind == "label" and (named := _LABEL.match(value)):
        key, wanted = named[1], named[2]
        keys.add(key)
        return lambda _, labels: key in labels and wanted in (None, labels[key])
    raise ValueError(f"selector {selector[:200]!r}: term {term[:200]!r} is none: it must be one of {ALLOWED}")


def _any_text(parts: Iterable[str]) -> str:
    return ".*".join(map(re.escape, parts)) + r"\Z"

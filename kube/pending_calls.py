"""The calls that a callback still needs for an object, after it raised.

Pure: which calls lead from what the callback took last to how the object is now. It may have done half of what it raised on.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, Generic, Protocol, TypeVar

from kube.objects import Metadata

DEPARTURES: Final = 16
"""Times that a callback is called for an object that is gone before this is given up, after about four minutes. Guessed. Of objects
that exist there is a bounded number; of those that are gone there is no end."""


class Keyed(Protocol):
    """What the cache needs of an object."""

    @property
    def metadata(self) -> Metadata:
        """Its ObjectMeta."""


T = TypeVar("T", bound=Keyed)


@dataclass(slots=True)
class PendingCalls(Generic[T]):
    """A change that the callback has raised on."""

    old: T | None
    new: T | None
    tries: int = 1


def steps(old: T | None, new: T | None) -> Iterator[tuple[T | None, T | None]]:
    """A change as the callback gets it: an object that has another's name comes after that one is gone."""
    if old is not None and new is not None and old.metadata.uid != new.metadata.uid:
        yield old, None
        old = None
    yield old, new


def pending_steps(pending: PendingCalls[T], new: T | None) -> Iterator[tuple[T | None, T | None]]:
    """From what the callback last raised on to how the object is now. One that has gone meanwhile is reported although the callback never took it."""
    seen = pending.new if pending.new is not None else pending.old
    if seen is not None and (new is None or new.metadata.uid != seen.metadata.uid or pending.new is None):
        yield seen, None
        if new is not None:
            yield None, new
    else:
        yield pending.old, new

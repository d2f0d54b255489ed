"""A JSON patch (RFC 6902), built in the order in which it applies.

Knows nothing of pods. `add` on a member that exists replaces it, which makes most of a patch shorter than a list of cases.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, TypeAlias

Op: TypeAlias = dict[str, Any]


def pointer(*parts: str) -> str:
    """A JSON pointer to `parts`, escaped as RFC 6901 says."""
    return "".join("/" + part.replace("~", "~0").replace("/", "~1") for part in parts)


@dataclass(slots=True)
class Patch:
    """Operations so far."""

    ops: list[Op] = field(default_factory=list)

    def set(self, path: str, value: Any) -> None:
        """Write a member, or insert before an element of a list."""
        self.ops.append({"op": "add", "path": path, "value": value})

    def remove(self, path: str) -> None:
        """Take a member away; it must be there."""
        self.ops.append({"op": "remove", "path": path})

    def put(self, parent: str, members: dict[str, str], *, there: bool) -> None:
        """Write members into the object at `parent`, which is made when it is not `there`."""
        if members and not there:
            self.set(parent, members)
        elif members:
            for key, value in members.items():
                self.set(parent + pointer(key), value)

"""The scheduler's extender protocol: k8s.io/kube-scheduler/extender/v1, version 1.36.

Go's field names, as encoding/json writes them; the pod inside is an ordinary v1.Pod. Answers write every field that is set and leave
out the rest, but never NodeNames: null NodeNames and null Nodes together mean that nothing fits, without saying so.
"""

from __future__ import annotations

import msgspec

from kube.objects import Pod


class FilterArgs(msgspec.Struct, frozen=True):
    """ExtenderArgs."""

    pod: Pod = msgspec.field(name="Pod")
    node_names: tuple[str, ...] | None = msgspec.field(name="NodeNames", default=None)
    """None when the scheduler sends whole nodes, because it is not configured with nodeCacheCapable."""


class FilterReader:
    """Reads the bodies of filter calls.

    The names of the nodes are most of a body: 440 kB and 3 ms of reading and looking up for 10,000 (measured). They are the last
    field, and where they are byte for byte what they were in the last call, so is the tuple that is answered. What stands before
    them is then read as a whole object of its own, so nothing that looks like the list inside a pod can be taken for it.
    """

    def __init__(self) -> None:
        self._args = msgspec.json.Decoder(FilterArgs)
        self._names = msgspec.json.Decoder(_Names)
        self._last: tuple[bytes, tuple[str, ...] | None] = b"", None

    def read(self, body: bytes) -> FilterArgs:
        """Raises MsgspecError or UnicodeDecodeError."""
        try:
            return self._in_two(body)
        except (msgspec.MsgspecError, UnicodeDecodeError):
            return self._args.decode(body)

    def _in_two(self, body: bytes) -> FilterArgs:
        tail, names = self._last
        if not (tail and body.endswith(tail)):
            at = body.rfind(b',"NodeNames":[')
            if at < 0:
                return self._args.decode(body)
            tail = body[at:]
            names = self._names.decode(b"{" + tail[1:]).node_names
            self._last = tail, names
        args = self._args.decode(body[: -len(tail)] + b"}")
        return FilterArgs(args.pod, names)


class _Names(msgspec.Struct, frozen=True):
    """The last field of ExtenderArgs, alone."""

    node_names: tuple[str, ...] = msgspec.field(name="NodeNames")


class FilterResult(msgspec.Struct, frozen=True):
    """ExtenderFilterResult."""

    node_names: list[str] = msgspec.field(name="NodeNames", default_factory=list)
    failed: dict[str, str] = msgspec.field(name="FailedNodes", default_factory=dict)
    """Node -> reason; evicting pods might help."""
    unresolvable: dict[str, str] = msgspec.field(name="FailedAndUnresolvableNodes", default_factory=dict)
    """Node -> reason; evicting pods would not help."""
    error: str = msgspec.field(name="Error", default="")


class BindingArgs(msgspec.Struct, frozen=True):
    """ExtenderBindingArgs."""

    name: str = msgspec.field(name="PodName")
    namespace: str = msgspec.field(name="PodNamespace")
    uid: str = msgspec.field(name="PodUID")
    node: str = msgspec.field(name="Node")

    @property
    def key(self) -> str:
        """`namespace/name`."""
        return f"{self.namespace}/{self.name}"


class BindingResult(msgspec.Struct, frozen=True):
    """ExtenderBindingResult. An empty error is success."""

    error: str = msgspec.field(name="Error", default="")

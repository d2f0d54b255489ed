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
    node_names: list[str] | None = msgspec.field(name="NodeNames", default=None)
    """None when the scheduler sends whole nodes, because it is not configured with nodeCacheCapable."""


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

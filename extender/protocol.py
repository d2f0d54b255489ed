"""The scheduler's extender protocol: k8s.io/kube-scheduler/extender/v1, version 1.36.

Go's field names, as encoding/json writes them; the pod inside is an ordinary v1.Pod. Answers write every field that is set and leave
out the rest, but never NodeNames: null NodeNames and null Nodes together mean that nothing fits, without saying so.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec

from kube.objects import Pod
from vgpu.scheduling.nodes.name_index import Quoted


@dataclass(frozen=True, slots=True)
class FilterArgs:
    """ExtenderArgs."""

    pod: Pod
    node_names: Sequence[str] | None
    """None when the scheduler sends whole nodes, because it is not configured with nodeCacheCapable."""


class _FilterArgs(msgspec.Struct, frozen=True):
    """The same, as it is decoded."""

    pod: Pod = msgspec.field(name="Pod")
    node_names: tuple[str, ...] | None = msgspec.field(name="NodeNames", default=None)


class FilterReader:
    """Reads the bodies of filter and prioritize calls.

    The names of the nodes are most of a body: 440 kB for 10,000. They are its last field, and if they can be separated from the rest
    they stay as they are (`vgpu.scheduling.nodes.name_index`). That is so when what stands before them is a whole object of its own, so nothing that looks
    like the list inside a pod can be taken for it, and no bracket stands between the list's own: what then reads as a list of strings is
    what a plain reader would read, and what does not is nothing that it would accept.
    """

    def __init__(self) -> None:
        self._args = msgspec.json.Decoder(_FilterArgs)

    def read(self, body: bytes) -> FilterArgs:
        """Raises MsgspecError or UnicodeDecodeError, if not here then where the names are read."""
        at = body.find(_LIST)
        start, end = at + len(_LIST), len(body) - len(_END)
        if at >= 0 and start < end and body.find(_END[:1], start) == end and body.endswith(_END):
            try:
                return FilterArgs(self._args.decode(body[:at] + b"}").pod, Quoted(body, start, end))
            except (msgspec.MsgspecError, UnicodeDecodeError):
                return self._whole(body)
        return self._whole(body)

    def _whole(self, body: bytes) -> FilterArgs:
        args = self._args.decode(body)
        return FilterArgs(args.pod, args.node_names)


_LIST: Final = b',"NodeNames":['
_END: Final = b"]}"


@dataclass(frozen=True, slots=True)
class FilterResult:
    """ExtenderFilterResult, with the nodes by reason: few reasons apply to thousands of nodes."""

    node_names: Sequence[str] = field(default_factory=list)
    failed: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Reason -> nodes that it keeps out; evicting pods might help. No node stands twice in this and `unresolvable`."""
    unresolvable: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """The same, where evicting pods would not help."""
    error: str = ""

    def to_json(self) -> bytes:
        """As the scheduler reads it. `filter_answers` writes large results faster."""
        return msgspec.json.encode(
            _FilterResult(list(self.node_names), _by_node(self.failed), _by_node(self.unresolvable), self.error)
        )


class _FilterResult(msgspec.Struct, frozen=True):
    """The same, as it is encoded."""

    node_names: list[str] = msgspec.field(name="NodeNames")
    failed: msgspec.Raw = msgspec.field(name="FailedNodes")
    unresolvable: msgspec.Raw = msgspec.field(name="FailedAndUnresolvableNodes")
    error: str = msgspec.field(name="Error")


def _by_node(reasons: Mapping[str, Sequence[str]]) -> msgspec.Raw:
    """A JSON object of node -> reason."""
    return msgspec.Raw(b"{%b}" % b",".join(members(reason, nodes) for reason, nodes in reasons.items() if len(nodes)))


def members(reason: str, nodes: Sequence[str]) -> bytes:
    """The members of a JSON object that gives these nodes, one or more, this reason. From the list of names, since a mapping of 10,000 takes 3 ms more
    to make (measured)."""
    encoded = b":" + msgspec.json.encode(reason)
    listed = msgspec.json.encode(list(nodes))[1:-1]
    if listed.count(b",") == len(nodes) - 1:  # commas stand between names only
        return listed.replace(b'","', b'"' + encoded + b',"') + encoded
    return msgspec.json.encode(dict.fromkeys(nodes, reason))[1:-1]


class HostPriority(msgspec.Struct, frozen=True, gc=False):
    """Of a HostPriorityList, the answer of prioritize."""

    node: str = msgspec.field(name="Host")
    score: int = msgspec.field(name="Score")


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


class MetaPod(msgspec.Struct, frozen=True):
    """MetaPod: a pod by UID."""

    uid: str = msgspec.field(name="UID", default="")


class MetaVictims(msgspec.Struct, frozen=True):
    """MetaVictims."""

    pods: tuple[MetaPod, ...] | None = msgspec.field(name="Pods", default=None)
    violations: int = msgspec.field(name="NumPDBViolations", default=0)


class _Victims(msgspec.Struct, frozen=True):
    """Victims: whole pods, from a scheduler without nodeCacheCapable."""

    pods: tuple[Pod, ...] | None = msgspec.field(name="Pods", default=None)
    violations: int = msgspec.field(name="NumPDBViolations", default=0)


class PreemptionArgs(msgspec.Struct, frozen=True):
    """ExtenderPreemptionArgs. One of the two maps is null."""

    raw_pod: msgspec.Raw = msgspec.field(name="Pod")
    by_pods: dict[str, _Victims | None] | None = msgspec.field(name="NodeNameToVictims", default=None)
    by_uids: dict[str, MetaVictims | None] | None = msgspec.field(name="NodeNameToMetaVictims", default=None)

    @property
    def pod(self) -> Pod:
        """The preemptor."""
        return msgspec.json.decode(self.raw_pod, type=Pod)

    @property
    def needs_more_than_sums(self) -> bool:
        """Might a node be unfit for it for another reason than that something is used up?"""
        spec = msgspec.json.decode(self.raw_pod, type=_Placed).spec
        ports = any(port.get("hostPort") for one in (*spec.containers, *spec.init_containers) for port in one.ports)
        near = spec.affinity is not None and (spec.affinity.near or spec.affinity.far)
        return bool(ports or near or spec.spread or any("persistentVolumeClaim" in one for one in spec.volumes))

    @property
    def nodes(self) -> tuple[str, ...]:
        """Where the scheduler proposes to evict."""
        return tuple(self.by_uids if self.by_uids is not None else self.by_pods or ())

    def proposed(self) -> dict[str, MetaVictims]:
        """Node -> victims that the scheduler proposes."""
        if self.by_uids is not None:
            return {name: one or MetaVictims() for name, one in self.by_uids.items()}
        return {
            name: MetaVictims(tuple(MetaPod(pod.uid) for pod in one.pods or ()), one.violations)
            if one
            else MetaVictims()
            for name, one in (self.by_pods or {}).items()
        }


class PreemptionResult(msgspec.Struct, frozen=True):
    """ExtenderPreemptionResult. There is no Error in it: no nodes means that no pod is evicted."""

    nodes: dict[str, MetaVictims] = msgspec.field(name="NodeNameToMetaVictims", default_factory=dict)


class _PodAffinity(msgspec.Struct):
    near: Any = msgspec.field(name="podAffinity", default=None)
    far: Any = msgspec.field(name="podAntiAffinity", default=None)


class _Container(msgspec.Struct):
    ports: list[dict[str, Any]] = []


class _Spec(msgspec.Struct):
    affinity: _PodAffinity | None = None
    containers: list[_Container] = []
    init_containers: list[_Container] = msgspec.field(name="initContainers", default_factory=list)
    spread: list[Any] = msgspec.field(name="topologySpreadConstraints", default_factory=list)
    volumes: list[dict[str, Any]] = []


class _Placed(msgspec.Struct):
    """What restricts a pod to some nodes, beyond the resources that it uses."""

    spec: _Spec = msgspec.field(default_factory=_Spec)

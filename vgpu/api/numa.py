"""What decides on a node to which NUMA nodes the kubelet's TopologyManager aligns a container: the node annotation, and what it is made from.

The kubelet merges the hints of its device, CPU and memory managers by itself, and a device plugin cannot change the outcome. So the device
plugin publishes what the merge depends on, and `vgpu.scheduling.numa` predicts it. Only the policies `restricted` and `single-numa-node` refuse
pods; under `none` and `best-effort` nothing is published, and no device names its NUMA node.

Source: k8s.io/kubernetes v1.36.3, pkg/kubelet/cm (topologymanager, cpumanager, devicemanager) and pkg/kubelet/apis/config.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec

from vgpu.api.errors import BadDocument, NewerVersion
from vgpu.api.names import DEFAULT, Names

VERSION: Final = 1

RESTRICTED: Final = "restricted"
SINGLE: Final = "single-numa-node"
POLICIES: Final = ("none", "best-effort", RESTRICTED, SINGLE)
"""Of TopologyManager. Specified by the kubelet's configuration, as the other words here."""
REFUSING: Final = frozenset({RESTRICTED, SINGLE})
"""Policies under which the kubelet refuses a pod that it cannot align."""
SCOPES: Final = ("container", "pod")

MOST_NUMA_NODES: Final = 64
"""Bits of the kubelet's mask (bitmask.go)."""
MOST_PREDICTED_NODES: Final = 8
"""Above that nothing is predicted: it takes 2**nodes steps. The kubelet's own bound, unless its option max-allowable-numa-nodes raises it."""
MOST_TEXT: Final = 256 * 1024
"""Bytes of the annotation that are read: what Kubernetes allows all annotations of an object together."""


class NumaNode(msgspec.Struct, frozen=True, omit_defaults=True):
    """One NUMA node of a machine."""

    id: int
    cpus: int = 0
    """All of its CPUs that are online."""
    free: int = 0
    """Of them, those that a container may be given for itself now. 0 where the CPU manager's policy is not `static`."""
    distances: tuple[int, ...] = ()
    """To each NUMA node, as the kernel lists them. Only where the kubelet prefers the closest."""


class DeviceCount(msgspec.Struct, frozen=True):
    """Devices of another device plugin's resource on one NUMA node."""

    numa: int
    total: int
    free: int


class NumaFacts(msgspec.Struct, frozen=True, rename="camel", omit_defaults=True):
    """The annotation. A reader of an earlier version passes over further fields."""

    v: int
    policy: str
    """One of `REFUSING`."""
    scope: str
    """One of `SCOPES`."""
    nodes: tuple[NumaNode, ...]
    """By ID."""
    exclusive_cpus: bool = False
    """The CPU manager's policy is `static`: a Guaranteed pod's containers with whole CPUs get them for themselves."""
    prefer_closest: bool = False
    """TopologyManager's option prefer-closest-numa-nodes."""
    others: dict[str, tuple[DeviceCount, ...]] = {}
    """Resource of another device plugin that names NUMA nodes -> its devices."""
    counted: tuple[str, ...] = ()
    """UIDs of pods with GPUs that have CPUs for themselves, which `free` leaves out."""
    unpredictable: str = ""
    """Why the kubelet's choice cannot be predicted; empty if it can."""


def facts_to_json(facts: NumaFacts) -> str:
    """The annotation's value."""
    return msgspec.json.encode(facts).decode()


def facts_from_json(text: str, names: Names = DEFAULT) -> NumaFacts:
    """`names`: what is under our own domain is no other plugin's. Raises BadDocument."""
    if len(text) > MOST_TEXT:
        raise BadDocument(f"NUMA facts of {len(text)} characters: at most {MOST_TEXT} are read")
    try:
        facts = msgspec.json.decode(text, type=NumaFacts)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise BadDocument(f"NUMA facts cannot be read: {error}") from None
    if facts.v > VERSION:
        raise NewerVersion(f"NUMA facts have version {facts.v}: this Tangram reads up to {VERSION}")
    wrong = _wrong(facts, names)
    if wrong:
        raise BadDocument(f"NUMA facts: {wrong}")
    return facts


def _wrong(facts: NumaFacts, names: Names) -> str:
    ids = [node.id for node in facts.nodes]
    if facts.policy not in REFUSING:
        return f"the policy is {facts.policy[:80]!r}: it must be one of {', '.join(sorted(REFUSING))}"
    if facts.scope not in SCOPES:
        return f"the scope is {facts.scope[:80]!r}: it must be one of {', '.join(SCOPES)}"
    if not 1 <= len(ids) <= MOST_NUMA_NODES or len(set(ids)) < len(ids):
        return f"{len(ids)} NUMA nodes: there must be 1 to {MOST_NUMA_NODES}, each once"
    if any(not 0 <= id_ < MOST_NUMA_NODES for id_ in ids):
        return f"NUMA nodes {ids}: each must be 0 to {MOST_NUMA_NODES - 1}"
    if any(node.cpus < 0 or not 0 <= node.free <= node.cpus for node in facts.nodes):
        return "a NUMA node has fewer CPUs than are free"
    return _wrong_others(facts.others, frozenset(ids), names)


def _wrong_others(others: Mapping[str, tuple[DeviceCount, ...]], ids: frozenset[int], names: Names) -> str:
    counts = [one for those in others.values() for one in those]
    if any(not 0 <= one.free <= one.total for one in counts):
        return "a resource has fewer devices than are free"
    if elsewhere := {one.numa for one in counts} - ids:
        return f"a resource has devices on NUMA node {min(elsewhere)}, and the machine has NUMA nodes {sorted(ids)}"
    if any(map(names.ours, others)):
        return f"others has a resource under {names.domain}"
    return ""


@dataclass(frozen=True, slots=True)
class ContainerNeeds:
    """What of one container's request the kubelet aligns."""

    container: str
    cpus: int = 0
    """For itself: whole CPUs of a Guaranteed pod."""
    devices: Mapping[str, int] = field(default_factory=dict)
    """Extended resource -> quantity."""
    init: bool = False
    """It runs to completion before the next one starts, which reuses what it was given."""


@dataclass(frozen=True, slots=True)
class KubeletTopology:
    """What the kubelet's configuration says about alignment."""

    policy: str = "none"
    scope: str = "container"
    prefer_closest: bool = False
    static_cpus: bool = False
    unpredictable: str = ""


def kubelet_topology(configuration: Mapping[str, Any]) -> KubeletTopology:
    """Of a KubeletConfiguration, decoded. Fields that are not set have the kubelet's defaults. Raises BadDocument.

    What is set by flags or in a drop-in folder is not in this document.
    """
    policy = _word(configuration, "topologyManagerPolicy", "none", POLICIES)
    cpus = _word(configuration, "cpuManagerPolicy", "none", ("none", "static"))
    memory = _word(configuration, "memoryManagerPolicy", "None", ("None", "Static", "BestEffort"))
    cpu_options = _options(configuration, "cpuManagerPolicyOptions")
    gates = _options(configuration, "featureGates")
    reasons = []
    if memory != "None":
        reasons.append(f"the memory manager's policy is {memory}")
    if cpus == "static" and _yes(cpu_options.get("align-by-socket", "")):
        reasons.append("the CPU manager has the option align-by-socket")
    if _yes(gates.get("PodLevelResourceManagers", "")):
        reasons.append("the feature gate PodLevelResourceManagers is on")
    return KubeletTopology(
        policy,
        _word(configuration, "topologyManagerScope", "container", SCOPES),
        _yes(_options(configuration, "topologyManagerPolicyOptions").get("prefer-closest-numa-nodes", "")),
        cpus == "static",
        " and ".join(reasons) if policy in REFUSING else "",
    )


def _word(configuration: Mapping[str, Any], key: str, default: str, allowed: tuple[str, ...]) -> str:
    value = configuration.get(key) or default
    if value not in allowed:
        raise BadDocument(
            f"kubelet configuration: {key} is {str(value)[:80]!r}: it must be one of {', '.join(allowed)}"
        )
    return str(value)


def _options(configuration: Mapping[str, Any], key: str) -> dict[str, str]:
    value = configuration.get(key) or {}
    if not isinstance(value, Mapping):
        raise BadDocument(f"kubelet configuration: {key} must be a map")
    return {str(name): str(one) for name, one in value.items()}


def _yes(text: str) -> bool:
    """As Go's strconv.ParseBool."""
    return text in {"1", "t", "T", "true", "TRUE", "True"}

"""The filter verb: answer the one best node, and reserve there. And two verbs that rate nodes.

The answer is one node, not a list: with more than one left, kube-scheduler scores them, and its random ties cost more than the best policy
gains (docs/reference/policies.md). A pod with an earlier reservation is placed again, unless its Binding may already have been written.

For a pod of a policy that lists (`scheduler`) the answer is every node that fits, and nothing is reserved: kube-scheduler chooses the node.
Bind chooses the GPUs, and refuses if they have been assigned meanwhile; kube-scheduler then starts over. If one node is left, as for a
nominated pod, there is no choice, and filter reserves as for other pods. It also does where nomination reservations had to yield.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from extender.preferences import preferences_of
from extender.protocol import FilterArgs, FilterResult
from extender.reasons import BINDING, BOUND, eviction_may_help
from extender.state import State
from kube.objects import Pod
from vgpu.api.burst import Burst
from vgpu.api.errors import BadRequest
from vgpu.api.request import PodRequest
from vgpu.scheduling.bursts import fitting_with_limits, limits_reason
from vgpu.scheduling.placement import LIMITS, Placement, rate, spare
from vgpu.scheduling.policies.registry import POLICIES

DETAILED: Final = 3
"""Nodes whose reason has figures. Guessed: what an Event can show."""

NO_NAMES = "the scheduler sent no NodeNames: configure this extender with nodeCacheCapable: true"


def filter_nodes(state: State, args: FilterArgs, *, may_list: bool = True) -> FilterResult:
    """Place the pod on one of the nodes named, and reserve it there.

    Without `may_list` also a pod of a policy that lists: capacity that yields for this call alone is gone at the next.
    """
    pod, candidates = args.pod, args.node_names
    if candidates is None:
        return FilterResult(error=NO_NAMES)
    try:
        request = state.request_of(pod)
    except BadRequest as error:
        return FilterResult(unresolvable={str(error): _each_once(candidates)})
    if not request:
        return FilterResult(candidates)
    if not pod.uid:
        return FilterResult(error=f"pod {pod.key} has no metadata.uid: nothing can be reserved for it")
    state.expire()
    if firm := _firm(state, pod):
        node, reason = firm
        if node in candidates:
            return FilterResult([node])
        return FilterResult(unresolvable={reason: _each_once(candidates)})
    state.end_reservation(pod.uid)
    bursts = state.bursts_of(pod, request)
    if may_list and POLICIES[request.policy].lists:
        fit = fitting_with_limits(state.fleet, request, bursts, candidates, state.only(request))
        if len(fit) > 1:
            return FilterResult(fit)
    answer = state.place(request, candidates, preferences_of(pod, state.spread_index), bursts)
    if isinstance(answer, Placement):
        state.reserve(pod.uid, pod.key, request, answer)
        return FilterResult([answer.node])
    if refused := answer.nodes.pop(LIMITS, None):
        answer.nodes.update(_with_figures(state, request, bursts, refused))
    return _nowhere(answer.nodes)


def prioritize_nodes(state: State, args: FilterArgs) -> dict[str, int]:
    """Node -> how good it is for the pod's GPUs, 0 to 10. Raises BadRequest."""
    request = state.request_of(args.pod)
    if not request or args.node_names is None:
        return {}
    return rate(state.fleet, request, args.node_names, state.only(request))


def spare_nodes(state: State, args: FilterArgs) -> dict[str, int]:
    """Node -> how good it is for a pod without a GPU, 0 to 10; none for a pod that requests one. Raises BadRequest."""
    if state.request_of(args.pod) or args.node_names is None:
        return {}
    return spare(state.fleet, args.node_names)


def _firm(state: State, pod: Pod) -> tuple[str, str] | None:
    """Node and reason, if the pod is bound or its Binding may already have been written."""
    allocation = state.allocations.place_of(pod.uid)
    if allocation is None:
        return None
    reservation = state.reservations.get(pod.uid)
    if reservation is None:
        return allocation.node, BOUND
    return (allocation.node, BINDING) if reservation.firm else None


def _with_figures(
    state: State, request: PodRequest, bursts: Mapping[str, Burst], nodes: Sequence[str]
) -> dict[str, Sequence[str]]:
    """Reasons of these nodes, those of the first ones with figures: kube-scheduler counts equal reasons."""
    found: dict[str, list[str]] = {LIMITS: list(nodes[DETAILED:])} if nodes[DETAILED:] else {}
    for node in nodes[:DETAILED]:
        found.setdefault(limits_reason(state.fleet, request, bursts, node) or LIMITS, []).append(node)
    return dict(found)


def _nowhere(nodes: Mapping[str, Sequence[str]]) -> FilterResult:
    return FilterResult(
        failed={reason: those for reason, those in nodes.items() if eviction_may_help(reason)},
        unresolvable={reason: those for reason, those in nodes.items() if not eviction_may_help(reason)},
    )


def _each_once(names: Sequence[str]) -> list[str]:
    return list(dict.fromkeys(names))

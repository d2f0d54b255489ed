"""Apply what the watch shows of nodes and pods to the state.

A pod counts while it is bound, has an assignment and has not finished, also while it terminates: its containers may still use memory. If an
assignment cannot be read, its node takes no pods until that pod is gone; nothing is freed.

Runs in one event loop and never awaits, so each change is complete before the next call reads the state.
"""

from __future__ import annotations

from typing import Final

import structlog

from extender.node_resources import allocatable_of
from extender.state import State
from kube.objects import Node, Pod
from kube.pod_requests import requests_of
from vgpu.api.codec import assignment_from_json
from vgpu.api.errors import BadDocument, BadRequest
from vgpu.scheduling.nodes.constraints import ANYWHERE

SAMPLE: Final = 8
"""Of the pods that had started before they were first seen, one in so many counts in the request distribution. Guessed: 50,000 take half a second."""

log = structlog.get_logger("extender.watch_intake")


class WatchIntake:
    """The one writer of what the API reports."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._seen_started = 0

    def node_changed(self, old: Node | None, new: Node | None) -> None:
        """A node was added, changed or removed. Only its inventory, cordoned GPUs, resources, labels and taints matter."""
        state = self._state
        if new is None:
            if old is not None:
                state.forget_node(old.metadata.name)
            return
        name, text = new.metadata.name, new.metadata.annotation(state.names.inventory)
        state.resources.set_node(name, allocatable_of(new.status))
        state.numa.set_node(name, new.metadata.annotation(state.names.numa))
        state.report_cpu({name})
        state.fleet.set_labels(name, new.metadata.labels, new.spec.taints)
        cordons = new.metadata.annotation(state.names.cordoned_gpus)
        if old is not None and name in state.inventories and self._gpus_of(old) == (text, cordons):
            return
        inventory = state.inventories.set_node(name, text, cordons)
        if inventory is not None or text is None:  # one that cannot be read frees nothing
            state.orphans.reported(name, inventory.orphans if inventory is not None else ())
        state.offer(name)

    def _gpus_of(self, node: Node) -> tuple[str | None, str | None]:
        names = self._state.names
        return node.metadata.annotation(names.inventory), node.metadata.annotation(names.cordoned_gpus)

    def pod_changed(self, old: Pod | None, new: Pod | None) -> None:
        """A pod was added, changed or removed."""
        if new is None or new.finished:
            for pod in (old, new):
                if pod is not None:
                    self._state.forget_pod(pod.uid)
            return
        if old is None or old.uid != new.uid:
            self._count_request(new)
        self._state.spread_index.see(new)
        if new.spec.node_name:
            self._state.end_set_aside(new.uid)
            self._state.report_cpu(self._state.resources.allocate(new.uid, new.spec.node_name, requests_of(new)))
            self._bound(new)

    def _count_request(self, pod: Pod) -> None:
        """Count the pod in the request distribution. Of pods that already ran, a sample is enough: reading a request takes 0.1 ms."""
        if pod.status.start_time:
            self._seen_started += 1
            if self._seen_started % SAMPLE != 1:
                return
        try:
            request = self._state.request_of(pod)
        except BadRequest:  # filter reports it to the user
            return
        if request:
            self._state.fleet.record(request, pod.spec.constraints or ANYWHERE)

    def _bound(self, pod: Pod) -> None:
        state, text, node = self._state, pod.metadata.annotation(self._state.names.assignment), pod.spec.node_name
        if text is None:
            state.bound_unassigned(pod)
            return
        try:
            assignment = assignment_from_json(text)
        except BadDocument as error:
            log.error("an assignment cannot be read; its node takes no pods", pod=pod.key, node=node, error=str(error))
            state.inventories.block(node, pod.uid)
            state.reservations.end_all(pod.uid)  # the allocation, if there was one, stands
            state.offer(node)
            return
        state.reservations.end_all(pod.uid)
        state.orphans.seen(pod.uid, node)
        state.allocations.allocate(pod.uid, state.allocation_of(pod, assignment))
        state.unblock(pod.uid)

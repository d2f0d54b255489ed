"""The bind verb: one write that binds the pod and assigns its GPUs.

The API server copies the Binding's annotations to the pod in the write that sets spec.nodeName. So a bound pod always has its assignment. If
the reply is lost, a read of the pod shows the outcome: it is bound to this node, or it is not.

Without a reservation (the extender restarted, or kube-scheduler took longer than the reservation lives) bind chooses GPUs again, on the node
that kube-scheduler has chosen. If the pod does not fit there any more, kube-scheduler starts over.

With access mode cdi, and for MIG instances with each mode, `BindOrder` makes pods of one size start one after the other if they have
different GPUs of a node.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from http import HTTPStatus
from typing import Any

import msgspec

from extender.protocol import BindingArgs
from extender.state import State
from kube import paths
from kube.client import Client
from kube.errors import ApiError
from kube.objects import Pod
from vgpu.api.codec import assignment_to_json
from vgpu.api.contract import binding_annotations
from vgpu.api.errors import BadRequest, Refused
from vgpu.scheduling.placement import SWAP_RISK, Placement


class Binder:
    """Binds pods through `client`. Each call to the API may take `timeout_s`.

    `lifted` keeps a pod's other reservations (by UID) from blocking it while its GPUs are chosen. A pod may wait in the bind order for
    `wait_s`, which shortens the time that its write may take.
    """

    def __init__(
        self,
        state: State,
        client: Client,
        *,
        timeout_s: float,
        lifted: Callable[[str], AbstractContextManager[object]] = nullcontext,
        wait_s: float = 0.0,
    ) -> None:
        self._order = BindOrder(state, wait_s)
        self._state, self._client, self._timeout_s, self._lifted = state, client, timeout_s, lifted

    async def bind(self, args: BindingArgs) -> str:
        """Bind, and return the outcome: `bound`, or `bound already`. Raises Refused, BadRequest or ApiError; the reservation has then ended,
        or is in doubt if the write may still happen."""
        reservation = self._state.reservations.get(args.uid)
        if reservation is not None and (
            reservation.stage == "binding" or (reservation.firm and reservation.node != args.node)
        ):
            raise Refused(f"pod {args.key} is being bound to node {reservation.node} already")
        if reservation is None or reservation.node != args.node:
            pod = await self._pod(args)
            if self._is_ours(pod, args) or self._was_seen_bound(args):
                return "bound already"
            self._reserve_again(pod, args)
        timeout_s = await self._wait_in_order(args)
        if why := self._state.not_offered(args.uid):
            self._state.end_reservation(args.uid)
            raise Refused(f"pod {args.key} is not bound to node {args.node}: {why}")
        self._state.on("bind", args.uid)
        try:
            await self._post(args, timeout_s)
            self._state.on("accepted", args.uid)
            return "bound"
        except ApiError as error:
            await self._settle(args, error)
            return "bound already"
        finally:
            self._state.on("no answer", args.uid)  # no effect after an answer

    async def _wait_in_order(self, args: BindingArgs) -> float:
        """Return when the pod may be bound, with the seconds that are left for it. Raises Refused; the reservation has then ended."""
        if not self._order.blocked(args.uid):
            return self._timeout_s
        unblocked = await self._order.wait(args.uid)
        reservation = self._state.reservations.get(args.uid)
        if reservation is None or reservation.firm or reservation.node != args.node:
            raise Refused(
                f"pod {args.key} has lost its reservation on node {args.node} while it waited for another pod to start"
            )
        if not unblocked:
            why = self._order.why(args.uid) or SWAP_RISK
            self._state.end_reservation(args.uid)
            raise Refused(f"pod {args.key} is not bound to node {args.node} yet: {why}")
        return self._timeout_s - self._order.patience_s

    async def _post(self, args: BindingArgs, timeout_s: float) -> None:
        allocation = self._state.allocations.place_of(args.uid)
        metadata: dict[str, Any] = {"name": args.name, "namespace": args.namespace, "uid": args.uid}
        if allocation is not None:
            text = assignment_to_json(allocation.assignment)
            metadata["annotations"] = binding_annotations(allocation.assignment, text, self._state.names)
        target = {"apiVersion": "v1", "kind": "Node", "name": args.node}
        body = {"apiVersion": "v1", "kind": "Binding", "metadata": metadata, "target": target}
        path = paths.pod(args.namespace, args.name, "binding")
        await self._client.send("POST", path, body, timeout_s=timeout_s)

    async def _settle(self, args: BindingArgs, error: ApiError) -> None:
        """After an error: return if the pod is bound as requested, else raise. Ends the reservation if no write can still happen."""
        unanswered = error.transient and error.status != HTTPStatus.TOO_MANY_REQUESTS
        try:
            if (error.conflict or unanswered) and self._is_ours(await self._pod(args), args):
                return
        except ApiError as second:
            if (
                second.not_found and not unanswered
            ):  # else it may have been bound and deleted, and the watch will show both
                self._state.end_reservation(args.uid)
            raise error from second
        except (Refused, BadRequest):
            self._state.end_reservation(args.uid)
            raise
        if not unanswered:
            self._state.end_reservation(args.uid)
        raise error

    def _is_ours(self, pod: Pod, args: BindingArgs) -> bool:
        """Is the pod bound to the node of this call, by a Tangram extender?"""
        if not pod.spec.node_name:
            return False
        if pod.spec.node_name != args.node:
            raise Refused(f"pod {args.key} is bound to node {pod.spec.node_name}: it cannot be bound to {args.node}")
        if pod.metadata.annotation(self._state.names.assignment) is None and self._state.request_of(pod):
            raise Refused(f"pod {args.key} was bound to node {args.node} by another scheduler: it has no GPUs assigned")
        self._state.assume(pod)
        return True

    def _was_seen_bound(self, args: BindingArgs) -> bool:
        """Did the watch show the pod bound, or another bind call begin, while the pod was read? A firm reservation is not made anew."""
        allocation, reservation = self._state.allocations.place_of(args.uid), self._state.reservations.get(args.uid)
        if reservation is not None and reservation.firm:
            raise Refused(f"pod {args.key} is being bound to node {reservation.node} already")
        if allocation is None or reservation is not None:
            return False
        if allocation.node != args.node:
            raise Refused(f"pod {args.key} is bound to node {allocation.node}: it cannot be bound to {args.node}")
        return True

    def _reserve_again(self, pod: Pod, args: BindingArgs) -> None:
        """Reserve on the node that kube-scheduler has chosen. Nothing for a pod that requests no GPU."""
        request = self._state.request_of(pod)
        if not request:
            return
        self._state.expire()
        self._state.end_reservation(args.uid)
        with self._lifted(args.uid):
            answer = self._state.place(request, [args.node], bursts=self._state.bursts_of(pod, request))
            if not isinstance(answer, Placement):
                reason = answer.reasons.get(args.node, "unknown")
                raise Refused(f"pod {args.key} does not fit node {args.node} any more: {reason}")
            self._state.reserve(args.uid, args.key, request, answer)

    async def _pod(self, args: BindingArgs) -> Pod:
        path = paths.pod(args.namespace, args.name)
        pod = msgspec.json.decode(await self._client.get(path, timeout_s=self._timeout_s), type=Pod)
        if pod.uid != args.uid:
            raise Refused(f"pod {args.key} has uid {pod.uid}: the scheduler binds {args.uid}, which is gone")
        return pod


class BindOrder:
    """Makes two pods of one size that are to have different GPUs of a node start one after the other.

    With access mode cdi, and for MIG instances with each mode, the devices come from Allocate, and the kubelet distinguishes pods by their
    sizes alone. So while a pod is starting, no pod of its size may be bound to other GPUs of the node. `Accounting.only` avoids most such cases by
    placing them on the same GPU; a pod that is to have the emptiest GPU waits here instead. Pods of a node whose kubelet aligns pods or refuses them
    wait for each other, too: to which NUMA nodes it aligns one depends on those before it (`extender.numa`). `patience_s` is how long a bind call
    may wait; 0 = not at all.
    """

    def __init__(self, state: State, patience_s: float) -> None:
        self._state, self.patience_s = state, patience_s
        self._changed = asyncio.Event()
        state.allocations.on_started = self._changed.set

    def blocked(self, uid: str) -> bool:
        """May the pod not be bound now?"""
        return bool(self.why(uid))

    def why(self, uid: str) -> str:
        """Why it may not: a pod of its size is starting on another GPU of its node, or the kubelet would not align it to its GPUs now. Empty if it may."""
        if any(map(self._is_starting, self._state.allocations.mistakable(uid))):
            return SWAP_RISK
        return self._state.numa.waits(uid, self._is_starting)

    async def wait(self, uid: str) -> bool:
        """Return when no pod blocks this one, or patience has ended. Returns whether it may be bound."""
        if self.patience_s:
            with suppress(TimeoutError):
                async with asyncio.timeout(self.patience_s):
                    while self.blocked(uid):
                        self._changed.clear()
                        await self._changed.wait()
        return not self.blocked(uid)

    def _is_starting(self, uid: str) -> bool:
        """Is it bound, or perhaps about to be? The kubelet sees no other reservations."""
        reservation = self._state.reservations.get(uid)
        return reservation.firm if reservation is not None else self._state.allocations.place_of(uid) is not None

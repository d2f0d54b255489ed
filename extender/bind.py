"""The bind verb: one write that binds the pod and tells it its GPUs.

The API server copies the Binding's annotations to the pod in the write that sets spec.nodeName. So a bound pod always has its
assignment, and one whose reply was lost can be told by looking: it is bound to our node, or it is not.

Without a reservation (the extender was restarted, or the scheduler took longer than the reservation lives) the place is chosen again,
on the node that the scheduler has decided for. If it does not fit there any more the scheduler starts over.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from http import HTTPStatus
from typing import Any

import msgspec

from extender.bind_order import Turns
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

    `making_way` takes out of the way what is kept for a pod (by UID) while its place is chosen. A pod may wait for its turn for `wait_s`,
    which is taken off the time that its write may take.
    """

    def __init__(
        self,
        state: State,
        client: Client,
        *,
        timeout_s: float,
        making_way: Callable[[str], AbstractContextManager[object]] = nullcontext,
        wait_s: float = 0.0,
    ) -> None:
        self._turns = Turns(state, wait_s)
        self._state, self._client, self._timeout_s, self._making_way = state, client, timeout_s, making_way

    async def bind(self, args: BindingArgs) -> str:
        """Bind, and answer how it went: `bound`, or `bound already`. Raises Refused, BadAsk or ApiError with nothing left held,
        or held in doubt when the write may still happen."""
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
        timeout_s = await self._turn(args)
        self._state.on("bind", args.uid)
        try:
            await self._post(args, timeout_s)
            self._state.on("accepted", args.uid)
            return "bound"
        except ApiError as error:
            await self._settle(args, error)
            return "bound already"
        finally:
            self._state.on("no answer", args.uid)  # nothing where there was one

    async def _turn(self, args: BindingArgs) -> float:
        """Return when the pod may be bound, with the seconds that are left for it. Raises Refused with nothing left held."""
        if not self._turns.blocked(args.uid):
            return self._timeout_s
        came = await self._turns.come(args.uid)
        reservation = self._state.reservations.get(args.uid)
        if reservation is None or reservation.firm or reservation.node != args.node:
            raise Refused(f"pod {args.key} has lost its place on node {args.node} while it waited for its turn")
        if not came:
            self._state.cancel(args.uid)
            raise Refused(f"pod {args.key} is not bound to node {args.node} yet: {SWAP_RISK}")
        return self._timeout_s - self._turns.patience_s

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
        """After an error: return if the pod is bound as we wanted, else raise. Gives the place back when no write can still happen."""
        unanswered = error.transient and error.status != HTTPStatus.TOO_MANY_REQUESTS
        try:
            if (error.conflict or unanswered) and self._is_ours(await self._pod(args), args):
                return
        except ApiError as second:
            if (
                second.not_found and not unanswered
            ):  # else it may have been bound and deleted: the watch has both yet to tell
                self._state.cancel(args.uid)
            raise error from second
        except (Refused, BadRequest):
            self._state.cancel(args.uid)
            raise
        if not unanswered:
            self._state.cancel(args.uid)
        raise error

    def _is_ours(self, pod: Pod, args: BindingArgs) -> bool:
        """Is the pod bound to the node that the scheduler wants, by us?"""
        if not pod.spec.node_name:
            return False
        if pod.spec.node_name != args.node:
            raise Refused(f"pod {args.key} is bound to node {pod.spec.node_name}: it cannot be bound to {args.node}")
        if pod.metadata.annotation(self._state.names.assignment) is None and self._state.request_of(pod):
            raise Refused(f"pod {args.key} was bound to node {args.node} by someone else: it has no GPUs assigned")
        self._state.assume(pod)
        return True

    def _was_seen_bound(self, args: BindingArgs) -> bool:
        """What the watch told, or another bind call did, while the pod was read: a place that is firm is not chosen anew."""
        allocation, reservation = self._state.allocations.place_of(args.uid), self._state.reservations.get(args.uid)
        if reservation is not None and reservation.firm:
            raise Refused(f"pod {args.key} is being bound to node {reservation.node} already")
        if allocation is None or reservation is not None:
            return False
        if allocation.node != args.node:
            raise Refused(f"pod {args.key} is bound to node {allocation.node}: it cannot be bound to {args.node}")
        return True

    def _reserve_again(self, pod: Pod, args: BindingArgs) -> None:
        """Hold a place on the node that was decided for, chosen now. Nothing for a pod that does not request ours."""
        request = self._state.request_of(pod)
        if not request:
            return
        self._state.expire()
        self._state.cancel(args.uid)
        with self._making_way(args.uid):
            answer = self._state.place(request, [args.node])
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

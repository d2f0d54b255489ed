"""What needs the rights of this program, or is known here, and needs no NVML: it is answered without a child."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from nvml.descriptors import gpu_open
from nvml.mapped import MapsCheck
from nvml.messages import (
    MOST_MAPS,
    AnyReply,
    AnyRequest,
    DescriptorsReply,
    DescriptorsRequest,
    ErrorReply,
    HealthReply,
    HealthRequest,
    MapsReply,
    MapsRequest,
)

LOCAL: Final = (MapsRequest, DescriptorsRequest)


class LocalAnswers:
    """Examines processes of the node. If reading maps hangs, descriptors are read all the same, and the other way round.

    `health`: what was read last of a GPU, by UUID; None = a child is queried.
    """

    def __init__(
        self,
        maps: MapsCheck | None = None,
        descriptors: MapsCheck | None = None,
        health: Callable[[str], HealthReply] | None = None,
    ) -> None:
        self._health = health
        self._maps, self._descriptors = maps or MapsCheck(), descriptors or MapsCheck(gpu_open)

    def answer_all(
        self, requests: Sequence[AnyRequest], carry: Callable[[Sequence[AnyRequest]], Sequence[AnyReply]]
    ) -> list[AnyReply]:
        """A reply for each. `carry` brings those that need NVML to the child, together; what it raises is raised."""
        known = [self.answer(request) for request in requests]
        for_child = [request for request, reply in zip(requests, known, strict=True) if reply is None]
        replies = iter(carry(for_child) if for_child else ())
        return [next(replies) if reply is None else reply for reply in known]

    def answer(self, request: AnyRequest) -> MapsReply | DescriptorsReply | HealthReply | ErrorReply | None:
        """As it goes over the socket. None = a child is to answer."""
        if isinstance(request, HealthRequest) and self._health is not None:
            return self._health(request.uuid)
        if not isinstance(request, LOCAL):
            return None
        if len(request.processes) > MOST_MAPS:
            return ErrorReply(f"{request.wants}: {len(request.processes)} processes, at most {MOST_MAPS} are examined")
        if isinstance(request, MapsRequest):
            return MapsReply(self._maps.of(request.processes))
        return DescriptorsReply(self._descriptors.of(request.processes))

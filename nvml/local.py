"""What needs the rights of this program and no NVML: it is answered here, without a child."""

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
    MapsReply,
    MapsRequest,
)

LOCAL: Final = (MapsRequest, DescriptorsRequest)


class LocalAnswers:
    """Examines processes of the node. If reading maps hangs, descriptors are read all the same, and the other way round."""

    def __init__(self, maps: MapsCheck | None = None, descriptors: MapsCheck | None = None) -> None:
        self._maps, self._descriptors = maps or MapsCheck(), descriptors or MapsCheck(gpu_open)

    def answer_all(
        self, requests: Sequence[AnyRequest], carry: Callable[[Sequence[AnyRequest]], Sequence[AnyReply]]
    ) -> list[AnyReply]:
        """A reply for each. `carry` brings those that need NVML to the child, together; what it raises is raised."""
        for_child = [request for request in requests if not isinstance(request, LOCAL)]
        replies = iter(carry(for_child) if for_child else ())
        return [self.answer(request) if isinstance(request, LOCAL) else next(replies) for request in requests]

    def answer(self, request: MapsRequest | DescriptorsRequest) -> MapsReply | DescriptorsReply | ErrorReply:
        """As it goes over the socket."""
        if len(request.processes) > MOST_MAPS:
            return ErrorReply(f"{request.wants}: {len(request.processes)} processes, at most {MOST_MAPS} are examined")
        if isinstance(request, MapsRequest):
            return MapsReply(self._maps.of(request.processes))
        return DescriptorsReply(self._descriptors.of(request.processes))

"""Report with an Event that a pod's request fits the GPUs of a node together, but no single GPU.

`kubectl describe node` shows sums, and kube-scheduler's own Event counts reasons; neither shows a user that a smaller request would fit.
Filter only notes the pod: free capacity is read some seconds later, outside kube-scheduler's call, and for few pods at a time. So of many that
wait some are reported now and others later, each once in `AGAIN_S`. A pod that is placed by then, or has a preemption reservation, is not reported.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from extender.state import State
from kube.events import Recorder, about
from kube.objects import Pod
from vgpu.api.errors import BadRequest
from vgpu.api.inventory import Gpu
from vgpu.api.request import PodRequest
from vgpu.scheduling.explain import Scattered, gpus_of, need_of, scattered

REASON: Final = "NoSingleGPU"

SETTLE_S: Final = 3.0
"""From filter's refusal to the report. An eviction, which makes a report useless, is begun within one second or two."""

AGAIN_S: Final = 600.0
"""The same pod is reported again after this. As long as an Event is counted on (`kube.events.SERIES_S`)."""

NOTED: Final = 16
"""Pods noted at a time: each keeps a list of its nodes, 80 kB at 10,000. Others are when they are filtered again. Guessed."""

AT_ONCE: Final = 2
"""Pods reported in one second: each takes 1 to 2 ms of the event loop at 10,000 nodes, and one write to the API."""


class FitReporter:
    """`pod_of` finds a pod by `namespace/name`; `is_preemptor`: does a pod with this UID have a preemption reservation?"""

    def __init__(
        self,
        state: State,
        recorder: Recorder,
        *,
        pod_of: Callable[[str], Pod | None],
        is_preemptor: Callable[[str], bool],
        clock: Callable[[], float],
    ) -> None:
        self._state, self._recorder, self._pod_of, self._is_preemptor = state, recorder, pod_of, is_preemptor
        self._clock = clock
        self._noted: dict[str, tuple[float, str, Sequence[str]]] = {}
        """UID -> when, key, and the nodes on which no single GPU has enough free."""
        self._reported: dict[str, float] = {}
        """UID -> when. At most `AT_ONCE * AGAIN_S` of them."""

    def found_no_single_gpu(self, pod: Pod, nodes: Sequence[str]) -> None:
        """Filter refused a pod: on these nodes no single GPU has enough free."""
        if len(self._noted) < NOTED and pod.uid not in self._reported:
            self._noted[pod.uid] = self._clock(), pod.key, nodes

    def expire(self) -> None:
        """Once a second: report, and forget what was reported long ago."""
        now_s = self._clock()
        for uid in [uid for uid, at_s in self._reported.items() if at_s + AGAIN_S <= now_s]:
            del self._reported[uid]
        due = [uid for uid, (at_s, _, _) in self._noted.items() if at_s + SETTLE_S <= now_s]
        for uid in due[:AT_ONCE]:
            _, key, nodes = self._noted.pop(uid)
            if self._report(uid, key, nodes):
                self._reported[uid] = now_s

    def _report(self, uid: str, key: str, nodes: Sequence[str]) -> bool:
        pod = self._state.unplaced(self._pod_of(key), uid)
        if pod is None or self._is_preemptor(uid):
            return False
        try:
            request = self._state.request_of(pod)
        except BadRequest:  # filter reports it to the user
            return False
        found = scattered(self._state.fleet, request, nodes)
        if found is not None:
            gpus = self._state.fleet.inventory[found.node].gpus
            text = note(request, found, [gpu for gpu in gpus if gpu.temporarily_withdrawn])
            self._recorder.event(about(pod), REASON, text, "Warning", action="Scheduling")
        return found is not None


def note(request: PodRequest, found: Scattered, withdrawn: Sequence[Gpu] = ()) -> str:
    """The sentence for the user. `withdrawn`: the node's GPUs that new pods do not get."""
    mib, percent = need_of(request) or (0, 0)
    gpus = gpus_of(request)
    requested = f"{mib} MiB and {percent} % gpu-core of {'one GPU' if gpus == 1 else f'each of {gpus} GPUs'}"
    return (
        f"Fits the sum of node {found.node}, no single GPU: {found.gpus} GPUs have {found.free_mib} MiB and "
        f"{found.free_percent} % gpu-core free together, the best of them {found.most_mib} MiB and "
        f"{found.most_percent} %; the pod requests {requested}"
        + (f". Not counted: {', '.join(map(_named, withdrawn))}" if withdrawn else "")
    )


def _named(gpu: Gpu) -> str:
    return f"GPU {gpu.index} ({', '.join(one.reason for one in gpu.withdrawn)})"

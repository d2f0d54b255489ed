"""What pods request, read once for the pods of one template."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import Final

import msgspec

from extender.node_resources import cpu_milli_of
from kube.alignment import container_needs
from kube.objects import Pod
from kube.pod_requests import requests_of
from vgpu.api.names import Names
from vgpu.api.request import PodRequest, pod_request
from vgpu.scheduling.policies.registry import POLICIES

TEMPLATES: Final = 1024
"""That are cached, 2 KB each: reading a request takes 70 us, and each pod's is needed about three times. Guessed."""


class RequestCache:
    """Of pods that request by these names, memory in units of `unit_mib`."""

    def __init__(self, names: Names, unit_mib: int) -> None:
        self._names, self._unit_mib = names, unit_mib
        self._heeded = names.user_annotations
        self._read = lru_cache(TEMPLATES)(self._read_one)

    def of(self, pod: Pod) -> PodRequest:
        """Raises BadRequest."""
        all_of_pod = pod.metadata.annotations or {}
        return self._read(pod.requesting({key: all_of_pod[key] for key in all_of_pod if key in self._heeded}))

    def _read_one(self, body: bytes) -> PodRequest:
        request = pod_request(msgspec.json.decode(body), names=self._names, unit_mib=self._unit_mib, policies=POLICIES)
        if not request:
            return request
        pod = msgspec.json.decode(body, type=Pod)
        requests = requests_of(pod)
        others = {resource: amount for resource, amount in requests.items() if not self._names.ours(resource)}
        return replace(request, cpu_milli=cpu_milli_of(requests), requests=others, needs=container_needs(pod.spec))

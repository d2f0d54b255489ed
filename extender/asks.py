"""What pods ask for, read once for the pods of one template."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import Final

import msgspec

from extender.node_resources import cpu_milli_of
from kube.objects import Pod
from kube.pod_requests import requests_of
from vgpu.names import Names
from vgpu.policy import POLICIES
from vgpu.request import PodAsk, pod_ask

TEMPLATES: Final = 1024
"""That are remembered, 2 KB each: reading an ask takes 70 us, and a pod is asked about three times. Guessed."""


class Asks:
    """Of pods that ask by these names, memory in units of `unit_mib`."""

    def __init__(self, names: Names, unit_mib: int) -> None:
        self._names, self._unit_mib = names, unit_mib
        self._heeded = names.user_annotations
        self._read = lru_cache(TEMPLATES)(self._read_one)

    def of(self, pod: Pod) -> PodAsk:
        """Raises BadAsk."""
        said = pod.metadata.annotations or {}
        return self._read(pod.asking({key: said[key] for key in said if key in self._heeded}))

    def _read_one(self, asking: bytes) -> PodAsk:
        ask = pod_ask(msgspec.json.decode(asking), names=self._names, unit_mib=self._unit_mib, policies=POLICIES)
        if not ask:
            return ask
        requests = requests_of(msgspec.json.decode(asking, type=Pod))
        others = {resource: amount for resource, amount in requests.items() if not self._names.ours(resource)}
        return replace(ask, cpu_milli=cpu_milli_of(requests), requests=others)

"""Keeps the node's annotation saying to which NUMA nodes the kubelet aligns pods by: its policy, and the CPUs that are free for one container.

Nothing happens where the policy refuses no pod: then no device names its NUMA node, and the annotation is not there. The kubelet's CPUs are those of
its pod resources API. That does not list init containers that run to completion: CPUs that one has for itself count as free until an app container
of its pod has them.
"""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import structlog
import yaml

from deviceplugin.gpus.offer import Offer
from deviceplugin.pod_resources import KubeletUnreachable, PodResources
from deviceplugin.pods.node_pods import NodePods
from deviceplugin.settings import DevicePluginSettings
from vgpu.api.errors import BadDocument
from vgpu.api.names import Names
from vgpu.api.numa import (
    REFUSING,
    VERSION,
    DeviceCount,
    KubeletTopology,
    NumaFacts,
    NumaNode,
    facts_to_json,
    kubelet_topology,
)
from vgpu_pb import podresources_pb2 as pb

CHECK_S: Final = 10.0
"""Between checks when no pod of the node changes. Guessed: pods without a GPU change nothing that the watch shows of CPUs."""
SETTLE_S: Final = 0.5
"""After a pod changed: several do so at once, and the kubelet is asked once. Guessed."""
LARGEST_BYTES: Final = 1024 * 1024
"""Of the kubelet's configuration file. Guessed: one of kubeadm has 1 KiB."""
_CPUS: Final = re.compile(r"[0-9]{1,5}(-[0-9]{1,5})?")
"""A part of a list of CPUs. Linux has 8,192 at most (NR_CPUS)."""

log = structlog.get_logger("deviceplugin.gpus.numa_watch")


class NumaWatch:
    """See the module. `changed` is called when the annotation should be another one."""

    def __init__(
        self,
        settings: DevicePluginSettings,
        offer: Offer,
        pods: NodePods,
        records: PodResources,
        changed: Callable[[], None] = lambda: None,
    ) -> None:
        self._settings, self._offer, self._pods, self._records = settings, offer, pods, records
        self.changed = changed
        self.failing = ""
        """Why the annotation is as it was; empty when it is right."""
        self._value: str | None = None
        self._known = not settings.numa

    def annotation(self) -> Mapping[str, str | None]:
        """Key -> value; None = it should not be there. Empty as long as that is not known."""
        return {self._settings.names.numa: self._value} if self._known else {}

    async def run(self) -> None:
        """Until cancelled."""
        if not self._settings.numa:
            return
        while True:
            await self.once()
            with suppress(TimeoutError):
                async with asyncio.timeout(CHECK_S):
                    await self._pods.changed()
            await asyncio.sleep(SETTLE_S)

    async def once(self) -> None:
        """Look at everything again. An error leaves what was known."""
        try:
            topology = await asyncio.to_thread(self._topology)
            facts = await self._facts(topology) if topology.policy in REFUSING else None
        except (OSError, BadDocument, KubeletUnreachable) as error:
            if str(error) != self.failing:
                log.error("to which NUMA nodes the kubelet aligns pods is not known", error=str(error), retry_s=CHECK_S)
            self.failing = str(error)
            return
        self.failing = ""
        value = facts_to_json(facts) if facts is not None else None
        if value != self._value or not self._known:
            self._value, self._known = value, True
            self.changed()
        self._offer.name_numa(facts is not None)

    def _topology(self) -> KubeletTopology:
        """Raises OSError, BadDocument."""
        if self._settings.kubelet_topology:
            return kubelet_topology(self._settings.kubelet_topology)
        return kubelet_topology(read_configuration(self._settings.kubelet_config))

    async def _facts(self, topology: KubeletTopology) -> NumaFacts:
        """Raises OSError, BadDocument, KubeletUnreachable."""
        cpus, distances = await asyncio.to_thread(read_numa_nodes, self._settings.numa_nodes_dir)
        machine, pods = await self._records.machine(), await self._records.pods()
        taken = await asyncio.to_thread(_cpus_of, pods)
        others = await asyncio.to_thread(others_of, machine, pods, self._settings.names, cpus.keys())
        free = set(machine.cpu_ids) - taken if topology.static_cpus else set()
        nodes = tuple(
            NumaNode(id_, len(those), len(those & free), distances[id_] if topology.prefer_closest else ())
            for id_, those in sorted(cpus.items())
        )
        return NumaFacts(
            VERSION, topology.policy, topology.scope, nodes, topology.static_cpus, topology.prefer_closest,
            others, self._counted(pods) if topology.static_cpus else (),
            topology.unpredictable,
        )  # fmt: skip

    def _counted(self, pods: Iterable[pb.PodResources]) -> tuple[str, ...]:
        """UIDs of pods with GPUs whose CPUs the kubelet lists. One that has not started may only have the name of one before."""
        found = []
        for one in pods:
            if not any(container.cpu_ids for container in one.containers):
                continue
            pod = self._pods.find(one.namespace, one.name)
            if pod is not None and pod.status.start_time and self._pods.node_pod(pod.uid) is not None:
                found.append(pod.uid)
        return tuple(sorted(found))


def _cpus_of(pods: Iterable[pb.PodResources]) -> set[int]:
    """That containers have for themselves."""
    return {cpu for pod in pods for container in pod.containers for cpu in container.cpu_ids}


def others_of(
    machine: pb.AllocatableResourcesResponse, pods: Iterable[pb.PodResources], names: Names, known: Collection[int]
) -> dict[str, tuple[DeviceCount, ...]]:
    """Resources of other device plugins that name NUMA nodes. Empty for one that has a device on several: the kubelet counts it on each.

    `known`: the machine's NUMA nodes. A device that names another, as -1, is passed over.
    """
    node_of: dict[str, dict[str, int]] = {}
    several: set[str] = set()
    for devices in machine.devices:
        nodes = [node.ID for node in devices.topology.nodes]
        if names.ours(devices.resource_name) or not nodes or nodes[0] not in known:
            continue
        for id_ in devices.device_ids:
            before = node_of.setdefault(devices.resource_name, {}).setdefault(id_, nodes[0])
            if len(nodes) > 1 or before != nodes[0]:
                several.add(devices.resource_name)
    used: dict[str, set[str]] = {}
    for pod in pods:
        for container in pod.containers:
            for devices in container.devices:
                if devices.resource_name in node_of:
                    used.setdefault(devices.resource_name, set()).update(devices.device_ids)
    found: dict[str, tuple[DeviceCount, ...]] = {}
    for resource, ids in sorted(node_of.items()):
        total = Counter(ids.values())
        busy = Counter(ids[id_] for id_ in used.get(resource, ()) if id_ in ids)
        counts = (DeviceCount(node, count, count - busy[node]) for node, count in sorted(total.items()))
        found[resource] = () if resource in several else tuple(counts)
    return found


def read_configuration(path: Path) -> Mapping[str, Any]:
    """The kubelet's configuration file, YAML or JSON. Raises OSError, BadDocument."""
    with path.open("rb") as file:
        text = file.read(LARGEST_BYTES + 1)
    if len(text) > LARGEST_BYTES:
        raise BadDocument(f"{path}: it has more than {LARGEST_BYTES} bytes")
    try:
        found = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # ValueError: a date that there is not
        raise BadDocument(f"{path}: it cannot be read as YAML: {error}") from None
    if not isinstance(found, Mapping) or found.get("kind") != "KubeletConfiguration":
        raise BadDocument(f"{path}: it is no KubeletConfiguration")
    return found


def read_numa_nodes(folder: Path) -> tuple[dict[int, set[int]], dict[int, tuple[int, ...]]]:
    """(NUMA node -> its CPUs, NUMA node -> distances) by the kernel's folder. Raises OSError, BadDocument."""
    cpus: dict[int, set[int]] = {}
    distances: dict[int, tuple[int, ...]] = {}
    for entry in folder.iterdir():
        if entry.name.startswith("node") and entry.name[4:].isdigit():
            node = int(entry.name[4:])
            cpus[node] = cpu_list((entry / "cpulist").read_text(errors="replace"))
            distances[node] = _numbers(entry / "distance")
    if not cpus:
        raise BadDocument(f"{folder}: it has no NUMA node")
    return cpus, distances


def _numbers(path: Path) -> tuple[int, ...]:
    text = path.read_text(errors="replace")
    if not all(one.isascii() and one.isdigit() for one in text.split()):
        raise BadDocument(f"{path}: it is {text[:80]!r}, and should be numbers")
    return tuple(map(int, text.split()))


def cpu_list(text: str) -> set[int]:
    """The CPUs of a list of the kernel, as `0-3,8`. Raises BadDocument."""
    found: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        if not _CPUS.fullmatch(part):
            raise BadDocument(f"a list of CPUs is {text[:80]!r}: it must be as 0-3,8")
        first, _, last = part.partition("-")
        found.update(range(int(first), int(last or first) + 1))
    return found

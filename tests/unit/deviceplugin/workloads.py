"""Pods as the kubelet has them, and the processes of their containers: for the node in `simulated`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import msgspec

from kube.objects import Pod
from tests.builders import pod
from tests.unit.deviceplugin.builders import uuid
from vgpu.api.codec import assignment_to_json
from vgpu.api.grant import AssignedGpu, Assignment
from vgpu.api.names import DEFAULT

MEM: Final = DEFAULT.gpu_mem
CORE: Final = DEFAULT.gpu_core


@dataclass
class SimulatedPod:
    """A pod as the kubelet has it."""

    uid: str
    name: str
    gpu: int
    units: int
    init_units: int
    """0 = it has no init container."""
    core: int = 0
    phase: str = "Pending"
    admitted: bool = False
    initialized: bool = False
    held: dict[tuple[str, str], tuple[str, ...]] = field(default_factory=dict)
    """(container, resource) -> device IDs, by the kubelet's checkpoint."""
    mounts: dict[str, Path] = field(default_factory=dict)
    """Container -> what Allocate answered."""
    running: str = ""

    @property
    def containers(self) -> list[tuple[str, int]]:
        return [*([("setup", self.init_units)] if self.init_units else []), ("main", self.units)]

    def wants(self, container: str, units: int) -> dict[str, int]:
        return {MEM: units} | ({CORE: self.core} if container == "main" and self.core else {})

    @property
    def gpus(self) -> dict[str, tuple[AssignedGpu, ...]]:
        return {
            container: (AssignedGpu(uuid(self.gpu), self.gpu, units * 1024, self.wants(container, units).get(CORE, 0)),)
            for container, units in self.containers
        }

    @property
    def assignment(self) -> Assignment:
        return Assignment(self.gpus, frozenset(self.gpus) & {"setup"})

    def seen(self) -> Pod:
        """As the watch shows it."""
        made = pod(self.name)
        for container, units in self.containers:
            core = self.wants(container, units).get(CORE, 0)
            made = made.asking(mib=units * 1024, core=core, container=container, init=container == "setup")
        plain = made.on("n1").assigned(text=assignment_to_json(self.assignment)).plain()
        plain["metadata"]["uid"] = self.uid
        plain["status"]["phase"] = self.phase
        if self.admitted:
            plain["status"]["startTime"] = "2026-01-01T00:00:00Z"
        if self.initialized:
            plain["status"]["conditions"] = [{"type": "Initialized", "status": "True"}]
        return msgspec.json.decode(msgspec.json.encode(plain), type=Pod)


@dataclass(frozen=True)
class SimulatedProcess:
    """What a container runs. It outlives its pod when that is deleted by force."""

    of: SimulatedPod
    container: str
    mount: Path
    inode: int
    ids: Mapping[str, frozenset[str]]
    """Resource -> devices that its pod had when it started."""

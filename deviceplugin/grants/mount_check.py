"""Check, after a container has started, that its grant is where the library is searched for; if not, report it to the pod's user. Whether it has a device node is seen too.

The kubelet calls before the container is made, and not afterwards. So the mounts of the pod's processes are read for some seconds.
An image may have a symbolic link where the grant belongs: the library is not loaded then, and no process of it has to use the GPU for us to see that.
What such a process does to the GPU is the arbiter's to see. Without the node's processes (`node.hostPID: false`) nothing is seen here.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Final, Protocol

import structlog

from deviceplugin.grants.allocation_record import Record
from kube.objects import Pod
from vgpu.api.mountinfo import misplaced

CHECK_S: Final = 0.5
CHECKS: Final = 3
"""In a row that find it misplaced: the runtime makes one mount after another. One less for a container that is gone by then: the arbiter may have
killed it. Guessed."""
TIMEOUT_S: Final = 60.0
"""For a container that was about to start. Guessed: its image is there already."""
REASON: Final = "GrantMisplaced"

log = structlog.get_logger("deviceplugin.grants.mount_check")


class PodsByUid(Protocol):
    """The pods of this node by UID, as `deviceplugin.pods.node_pods.NodePods` has them."""

    def pod(self, uid: str) -> Pod | None: ...


class GrantRecords(Protocol):
    """The records of allocations, as `deviceplugin.grants.grant_directories.GrantDirectories` has them."""

    def records(self) -> Mapping[str, Record]: ...


class Mounts(Protocol):
    """The mounts of processes, as `deviceplugin.pods.pod_processes.PodProcesses` sees them."""

    def mounts(self, uids: Collection[str]) -> Iterator[tuple[str, str, str]]: ...

    def has_device(self, pid: str, name: str) -> bool | None: ...


class DeviceSeen(Protocol):
    """Is called once for a container that has its grant, if its /dev can be seen."""

    def __call__(self, pod: Pod | None, container: str, *, has_devices: bool) -> None: ...


class MountCheck:
    """Of a node. `report` gets the pod, the container and a sentence. `device`: the node in /dev that `device_seen` is told about."""

    def __init__(
        self, pods: PodsByUid, grants: GrantRecords, processes: Mounts, report: Callable[[Pod, str, str], None],
        clock: Callable[[], float] = time.monotonic, *, device: str = "", device_seen: DeviceSeen | None = None,
    ) -> None:  # fmt: skip
        self._device, self._device_seen = device, device_seen
        self._bare: dict[str, int] = {}
        """Key -> checks in a row that found its container without the device."""
        self._pods, self._grants, self._processes, self._report, self._clock = pods, grants, processes, report, clock
        self._until: dict[str, float] = {}
        """Key -> when to stop checking."""
        self._checks: dict[str, list[str]] = {}
        """Key -> why it was not found, by the last checks in a row."""
        self._starting = asyncio.Event()

    def starting(self, keys: Iterable[str]) -> None:
        """Containers with these grant directories are about to start."""
        for key in keys:
            self._until[key] = self._clock() + TIMEOUT_S
            self._checks.pop(key, None)
            self._bare.pop(key, None)
            self._starting.set()

    async def run(self) -> None:
        """Until cancelled. Nothing is done while no container starts."""
        while True:
            await self._starting.wait()
            self._starting.clear()
            while self._until:
                await asyncio.sleep(CHECK_S)
                found, devices = await asyncio.to_thread(self._check, self._wanted())
                undecided = self._judge_devices(devices)
                gone = {
                    key: whys[-1] for key, whys in self._checks.items() if key not in found and len(whys) == CHECKS - 1
                }
                for key, why in (found | gone).items():
                    if why or key not in undecided:
                        self._judge(key, why)
                self._until = {key: until for key, until in self._until.items() if until > self._clock()}
                self._checks = {key: whys for key, whys in self._checks.items() if key in self._until}
                self._bare = {key: count for key, count in self._bare.items() if key in self._until}

    def _wanted(self) -> dict[str, str]:
        """Key -> UID of the pod."""
        records = self._grants.records()
        return {key: records[key].uid for key in self._until if key in records}

    def _check(self, uids: Mapping[str, str]) -> tuple[dict[str, str], dict[str, bool]]:
        """Key -> why its container does not find it; empty where any process does. And key -> has any process of it the device, where that can be seen?"""
        found: dict[str, str] = {}
        devices: dict[str, bool] = {}
        for uid, mountinfo, pid in self._processes.mounts(frozenset(uids.values())):
            for key, of in uids.items():
                if of != uid or (why := misplaced(mountinfo, key)) is None:
                    continue
                if found.get(key) != "":
                    found[key] = why
                if why or self._device_seen is None or key in devices:
                    continue
                if (has := self._processes.has_device(pid, self._device)) is not None:
                    devices[key] = has
        return found, devices

    def _judge_devices(self, devices: Mapping[str, bool]) -> set[str]:
        """Report what is certain. Returns keys whose containers may yet get the device: the runtime makes one after another."""
        undecided: set[str] = set()
        for key, has in devices.items():
            self._bare[key] = 0 if has else self._bare.get(key, 0) + 1
            if 0 < self._bare[key] < CHECKS:
                undecided.add(key)
                continue
            record = self._grants.records().get(key)
            if record is not None and self._device_seen is not None:
                self._device_seen(self._pods.pod(record.uid), record.container, has_devices=has)
        return undecided

    def _judge(self, key: str, why: str) -> None:
        whys = self._checks[key] = [*self._checks.get(key, ()), why] if why else []
        if 0 < len(whys) < CHECKS:
            return
        self._checks.pop(key, None)
        self._until.pop(key, None)
        record = self._grants.records().get(key)
        if not why or record is None:
            return
        note = f"container {record.container}: {why}, so the library is not loaded and its limits are not enforced. Use an image and volumes without symbolic links at /.tangram, at /etc and at the paths of volumes"
        log.error("a container does not find its grant", key=key, pod=f"{record.namespace}/{record.pod}", why=why)
        pod = self._pods.pod(record.uid)
        if pod is not None:
            self._report(pod, record.container, note)

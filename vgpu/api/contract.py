"""What the kubelet and a container are given: device IDs, mounts, environment, CDI names, grant folders.

Pure values that the device plugin and the webhook both use, so that both agree on them.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from vgpu.api.errors import BadDocument
from vgpu.api.grant import Assignment, Grant, GrantGpu
from vgpu.api.inventory import Inventory
from vgpu.api.mig_device import DEVICE_ID_LIMIT, slot_of_device
from vgpu.api.names import DEFAULT_OVER_LIMIT_ACTION, Names, OverLimitAction
from vgpu.api.request import FULL_CORE_PERCENT
from vgpu.api.uuids import UUID_LENGTH, kind_of_uuid

CONTAINER_DIR: Final = "/.tangram"
"""Where a container has its grant. Its parent is the root of the container's own file system, which no volume can be: a container that shares a
volume with it cannot remove the mount point."""
EARLIER_CONTAINER_DIR: Final = "/run/tangram"
"""Where the release before had it, and where its containers have it until they end."""
GRANT_DIRS: Final = (CONTAINER_DIR, EARLIER_CONTAINER_DIR)
"""In the order in which they are tried."""
LIBRARY: Final = "libtangram.so"
CONTAINER_LIBRARY: Final = f"{CONTAINER_DIR}/{LIBRARY}"
PRELOAD_FILE: Final = "/etc/ld.so.preload"
EARLIER_CONTAINER_LIBRARY: Final = f"{EARLIER_CONTAINER_DIR}/{LIBRARY}"
PRELOAD: Final = "preload"
"""The file of the state folder that is mounted there."""
PRELOAD_TEXTS: Final = {PRELOAD: f"{CONTAINER_LIBRARY}\n", "ld.so.preload": f"{EARLIER_CONTAINER_LIBRARY}\n"}
"""Such files of this release and of the one before, whose containers mount theirs at each restart."""
GRANT: Final = "grant"
BURST: Final = "burst"
"""In the grant directory of a container that may use more than its grant: how much in all (`vgpu.api.burst`)."""
CONTAINER_ID: Final = "container"
"""In the grant directory: the container runtime's ID of the container, once the pod's status has it."""
SOCKET: Final = "arbiter.sock"
SOCKET_DIR: Final = "socket"
"""In the grant directory: where the folder is mounted in which the arbiter makes the socket."""
GRANT_ENV: Final = "TANGRAM_GRANT"
"""Where nothing is mounted, the library reads it from there."""
GPUS_ENV: Final = "TANGRAM_GPUS"
NVIDIA_ENV: Final = "NVIDIA_VISIBLE_DEVICES"
PRELOAD_ENV: Final = "LD_PRELOAD"
CDI_KIND: Final = "tangram.sh/gpu"
_SLOT = re.compile(r"-(?:0|[1-9][0-9]*)\Z")


@dataclass(frozen=True, slots=True)
class Mount:
    """A read-only bind mount."""

    host: str
    container: str


@dataclass(frozen=True, slots=True)
class Device:
    """A device ID as the kubelet counts it."""

    id: str
    uuid: str
    healthy: bool
    numa: int


def devices(inventory: Inventory, names: Names) -> dict[str, tuple[Device, ...]]:
    """Resource name -> every device ID that the node offers under it.

    A GPU in MIG mode offers only its instances, and one that is not shared only itself; slots on demand depend on what is in use, and are not here. `gpu-mem` has one ID per memory unit, `gpu-core` one per percent;
    a rest of memory smaller than a unit is not offered.
    """
    mem, core, whole = [], [], []
    declared = {one.profile for gpu in inventory.gpus if not gpu.on_demand for one in gpu.instances}
    offered: dict[str, list[Device]] = {names.mig(profile): [] for profile in sorted(declared)}
    for gpu in inventory.gpus:
        if gpu.mig:
            for instance in () if gpu.on_demand else gpu.instances:
                offered[names.mig(instance.profile)].append(Device(instance.uuid, instance.uuid, gpu.healthy, gpu.numa))
            continue
        whole.append(Device(gpu.uuid, gpu.uuid, gpu.healthy, gpu.numa))
        if gpu.whole_only:
            continue
        mem += [
            Device(f"{gpu.uuid}-{slot}", gpu.uuid, gpu.healthy, gpu.numa)
            for slot in range(gpu.mib // inventory.unit_mib)
        ]
        core += [Device(f"{gpu.uuid}-{slot}", gpu.uuid, gpu.healthy, gpu.numa) for slot in range(FULL_CORE_PERCENT)]
    shared = {names.gpu_mem: mem, names.gpu_core: core, names.gpu: whole}
    return {resource: tuple(ids) for resource, ids in (shared | offered).items()}


def uuid_of(device_id: str) -> str:
    """The GPU or MIG UUID that a device ID carries; that of a MIG slot on demand is the slot's name, the ID itself.

    Raises BadDocument when it is not one of ours.
    """
    uuid, slot = device_id[:UUID_LENGTH], device_id[UUID_LENGTH:]
    kind = kind_of_uuid(uuid)
    if kind and len(device_id) <= DEVICE_ID_LIMIT and (not slot or (kind == "GPU" and _SLOT.match(slot))):
        return uuid
    if slot_of_device(device_id):
        return device_id
    raise BadDocument(
        f"device ID {device_id[:80]!r} is none of Tangram's: they are <uuid>, <uuid>-<slot> or <uuid>-<MIG profile>-<start>"
    )


def grant_key(device_ids: Iterable[str]) -> str:
    """Name of the grant directory for these device IDs and whatever else distinguishes one allocation from another: the same strings give the same name."""
    return hashlib.sha256("\n".join(sorted(device_ids)).encode()).hexdigest()[:32]


def mounts(state_root: str, key: str, *, earlier: bool = False) -> tuple[Mount, ...]:
    """What a container with a share finds in its file system. With `earlier` the library is where the release before had it, too."""
    more = (Mount(f"{state_root}/grants/{key}", EARLIER_CONTAINER_DIR),) if earlier else ()
    return (
        Mount(f"{state_root}/grants/{key}", CONTAINER_DIR),
        Mount(f"{state_root}/sockets/{key}", f"{CONTAINER_DIR}/{SOCKET_DIR}"),
        Mount(f"{state_root}/{PRELOAD}", PRELOAD_FILE),
        *more,
    )


def cdi_names(uuids: Iterable[str]) -> tuple[str, ...]:
    """Fully qualified CDI device names."""
    return tuple(f"{CDI_KIND}={uuid}" for uuid in uuids)


def binding_annotations(assignment: Assignment, assignment_json: str, names: Names) -> dict[str, str]:
    """Annotations that the Binding carries onto the pod."""
    per_container = {names.gpus_of(name): ",".join(assignment.uuids(name)) for name in assignment.containers}
    return {names.assignment: assignment_json} | per_container


def grant_for(
    assignment: Assignment,
    container: str,
    *,
    namespace: str,
    pod: str,
    uid: str,
    over_limit_action: OverLimitAction = DEFAULT_OVER_LIMIT_ACTION,
    clear: bool = False,
) -> Grant:
    """The limits of one container with a share.

    Raises BadDocument when the assignment gives it none: a grant without GPUs would limit nothing.
    """
    assigned = assignment.containers.get(container, ())
    gpus = tuple(GrantGpu(s.uuid, s.mib, s.core_percent) for s in assigned if s.kind == "share")
    if not gpus:
        shared = [name for name, given in assignment.containers.items() if any(s.kind == "share" for s in given)]
        raise BadDocument(
            f"assignment of pod {namespace}/{pod} gives container {container} no share: it must be one of {', '.join(shared) or 'none'}"
        )
    return Grant(
        namespace, pod, uid, container, gpus, assignment.service_class, assignment.level, over_limit_action, clear
    )

"""Which grant directory is which container's, when a container is about to start. Pure.

PreStartContainer names device IDs and neither a container nor a directory. An init container and an app container of a pod may
have exactly the same IDs, and each has a directory of its own: nothing shows which of them starts. So both directories are
written, each for its container, and it does not matter.

The kubelet gives IDs to one pod at a time, so the newest directories of these IDs are the pod's: as far back as none was granted to
another pod. Among them a container has the newest that was made for it. Allocate guessed the pod, but not the order: it serves
the containers of a pod in the order of its spec, so the place of a container in that order is right for the right pod, too.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from itertools import takewhile

from deviceplugin.allocation import NodePod
from deviceplugin.grants.allocation_record import Record
from deviceplugin.grants.grant_directories import GrantDirectory
from vgpu.api.errors import Refused
from vgpu.api.request import GpuRequest


def containers_of(
    folders: Sequence[GrantDirectory],
    node_pod: NodePod,
    units: int,
    listed: Collection[str],
    *,
    records: Collection[Record] = (),
    initialized: bool = False,
) -> dict[str, str]:
    """Key -> container of the pod that has this directory, for all that share these device IDs.

    `folders` are those of the IDs, the newest first, as `as_far_as_another` answers them; `records` are of all other directories of the
    pod, and of those pods that Allocate took it for.
    `listed` are the containers that the kubelet's records name with these IDs; it leaves out init containers.
    Raises Refused when a container that may be the one that starts has none: it would run without its limits.
    """
    sharing = [request for request in node_pod.requests if request.kind == "share" and request.units == units]
    mine, guesses = _mine(folders, node_pod.uid)
    found: dict[str, str] = {}
    for folder in mine:
        container = _container(folder, node_pod, sharing)
        if container is not None and container not in found.values():
            found[folder.key] = container
    these = {folder.key for folder in folders}
    elsewhere = {record.place for record in records if record.uid in guesses and record.key not in these}
    shared = any(
        folder.record is not None and not folder.record.suffix for folder in mine
    )  # by all, as earlier plugins did
    needed = [
        request.container
        for request in sharing
        if request.container in listed
        or (request.init and not (initialized or shared) and node_pod.requests.index(request) not in elsewhere)
    ] or [request.container for request in sharing if not found]
    without = [container for container in needed if container not in found.values()]
    unknown = [folder.key for folder in reversed(mine) if folder.record is None and folder.key not in found]
    if len(unknown) == len(without):  # neither a record nor a grant names the container, but the numbers agree
        return found | dict(zip(unknown, without, strict=True))
    if without and not unknown:
        since = _since_another_had_them(folders, node_pod.uid)[: len(needed)]
        if len(since) == len(needed):  # Allocate guessed differently from call to call: what is left is their order
            return {folder.key: container for folder, container in zip(reversed(since), needed, strict=True)}
    if without:
        raise Refused(_why(node_pod, without, units, folders, mine))
    return found


def _mine(folders: Sequence[GrantDirectory], uid: str) -> tuple[list[GrantDirectory], set[str]]:
    """As far back as none was granted to another pod, or guessed to be of yet another; and the UIDs of the pods that Allocate took it for."""
    mine: list[GrantDirectory] = []
    guesses = {uid}
    for folder in _since_another_had_them(folders, uid):
        if folder.record is not None:
            if not mine:
                guesses.add(folder.record.uid)
            elif folder.record.uid not in guesses:
                break
        mine.append(folder)
    return mine, guesses


def _since_another_had_them(folders: Sequence[GrantDirectory], uid: str) -> list[GrantDirectory]:
    """As far back as none was granted to another pod."""
    return list(takewhile(lambda folder: owner_of(folder) in ("", uid), folders))


def as_far_as_another(folders: Iterable[GrantDirectory], uid: str) -> list[GrantDirectory]:
    """The newest directories, to the first that was granted to another pod, this one included: no older one can be this pod's."""
    found: list[GrantDirectory] = []
    for folder in folders:
        found.append(folder)
        if owner_of(folder) not in ("", uid):
            break
    return found


def owner_of(folder: GrantDirectory) -> str:
    """UID of the pod that this directory was granted to; empty when it never was."""
    return folder.grant.uid if folder.grant is not None else ""


def _container(folder: GrantDirectory, node_pod: NodePod, sharing: Sequence[GpuRequest]) -> str | None:
    record = folder.record
    if record is not None and record.suffix and 0 <= record.place < len(node_pod.requests):
        request = node_pod.requests[record.place]
        return request.container if request in sharing else None
    if record is not None and not record.suffix and sharing:
        return sharing[
            -1
        ].container  # of an earlier plugin: one directory for all that share the IDs, the app container last
    if record is None and folder.grant is not None:
        named = folder.grant.container
        return named if any(request.container == named for request in sharing) else None
    return None


def _why(
    node_pod: NodePod,
    without: Sequence[str],
    units: int,
    folders: Sequence[GrantDirectory],
    mine: Sequence[GrantDirectory],
) -> str:
    what = f"{node_pod}: container {' and '.join(without)} with {units} devices has no grant directory"
    troubles = [folder.trouble for folder in folders if folder.trouble]
    if troubles:
        return f"{what} that can be read ({'; '.join(troubles)}): delete the pod, or mend the file"
    if len(mine) < len(folders):
        taken = folders[len(mine)]
        owner = owner_of(taken) or (taken.record.uid if taken.record else "")
        return f"{what}: the newest of these devices is {taken.key}, of pod UID {owner}: delete the pod"
    return f"{what}: it was removed from the state folder. Delete the pod, so that it is allocated anew"

"""Which grant directory is which container's, when a container is about to start. Pure.

PreStartContainer names device IDs and neither a container nor a directory. An init container and an app container of a pod may
have exactly the same IDs, and each has a directory of its own: nobody can tell which of them starts. So both directories are
written, each for its container, and it does not matter.

The kubelet gives IDs to one pod at a time, so the newest directories of these IDs are the pod's: as far back as none was granted to
another pod. Among them a container has the newest that was made for it. Allocate guessed the pod, but not the order: it serves
the containers of a pod in the order of its spec, so the place of a container in that order holds also for the right pod.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from itertools import takewhile

from deviceplugin.allocate import Tenant
from deviceplugin.grants import Folder
from deviceplugin.record import Record
from vgpu.errors import Refused
from vgpu.request import Ask


def containers_of(
    folders: Sequence[Folder],
    tenant: Tenant,
    units: int,
    listed: Collection[str],
    *,
    books: Collection[Record] = (),
    initialized: bool = False,
) -> dict[str, str]:
    """Key -> container of the pod that has this directory, for all that share these device IDs.

    `folders` are those of the IDs, the newest first, as `as_far_as_another` answers them; `books` are of all other directories of the
    pod, and of those pods that Allocate took it for.
    `listed` are the containers that the kubelet's books name with these IDs; it leaves out init containers.
    Raises Refused when a container that may be the one that starts has none: it would run without its limits.
    """
    sharing = [ask for ask in tenant.asks if ask.kind == "share" and ask.units == units]
    mine, guesses = _mine(folders, tenant.uid)
    found: dict[str, str] = {}
    for folder in mine:
        container = _container(folder, tenant, sharing)
        if container is not None and container not in found.values():
            found[folder.key] = container
    these = {folder.key for folder in folders}
    elsewhere = {book.place for book in books if book.uid in guesses and book.key not in these}
    shared = any(
        folder.record is not None and not folder.record.suffix for folder in mine
    )  # by all, as earlier plugins did
    needed = [
        ask.container
        for ask in sharing
        if ask.container in listed
        or (ask.init and not (initialized or shared) and tenant.asks.index(ask) not in elsewhere)
    ] or [ask.container for ask in sharing if not found]
    without = [container for container in needed if container not in found.values()]
    unknown = [folder.key for folder in reversed(mine) if folder.record is None and folder.key not in found]
    if len(unknown) == len(without):  # no book and no grant tells, but the numbers agree
        return found | dict(zip(unknown, without, strict=True))
    if without and not unknown:
        since = _since_another_had_them(folders, tenant.uid)[: len(needed)]
        if len(since) == len(needed):  # Allocate guessed differently from call to call: what is left is their order
            return {folder.key: container for folder, container in zip(reversed(since), needed, strict=True)}
    if without:
        raise Refused(_why(tenant, without, units, folders, mine))
    return found


def _mine(folders: Sequence[Folder], uid: str) -> tuple[list[Folder], set[str]]:
    """As far back as none was granted to another pod, or guessed to be of yet another; and for whom Allocate took the pod."""
    mine: list[Folder] = []
    guesses = {uid}
    for folder in _since_another_had_them(folders, uid):
        if folder.record is not None:
            if not mine:
                guesses.add(folder.record.uid)
            elif folder.record.uid not in guesses:
                break
        mine.append(folder)
    return mine, guesses


def _since_another_had_them(folders: Sequence[Folder], uid: str) -> list[Folder]:
    """As far back as none was granted to another pod."""
    return list(takewhile(lambda folder: owner_of(folder) in ("", uid), folders))


def as_far_as_another(folders: Iterable[Folder], uid: str) -> list[Folder]:
    """The newest directories, to the first that was granted to another pod, this one included: no older one can be this pod's."""
    found: list[Folder] = []
    for folder in folders:
        found.append(folder)
        if owner_of(folder) not in ("", uid):
            break
    return found


def owner_of(folder: Folder) -> str:
    """UID of the pod that this directory was granted to; empty when it never was."""
    return folder.grant.uid if folder.grant is not None else ""


def _container(folder: Folder, tenant: Tenant, sharing: Sequence[Ask]) -> str | None:
    record = folder.record
    if record is not None and record.suffix and 0 <= record.place < len(tenant.asks):
        ask = tenant.asks[record.place]
        return ask.container if ask in sharing else None
    if record is not None and not record.suffix and sharing:
        return sharing[
            -1
        ].container  # of an earlier plugin: one directory for all that share the IDs, the app container last
    if record is None and folder.grant is not None:
        named = folder.grant.container
        return named if any(ask.container == named for ask in sharing) else None
    return None


def _why(tenant: Tenant, without: Sequence[str], units: int, folders: Sequence[Folder], mine: Sequence[Folder]) -> str:
    what = f"{tenant}: container {' and '.join(without)} with {units} devices has no grant directory"
    troubles = [folder.trouble for folder in folders if folder.trouble]
    if troubles:
        return f"{what} that can be read ({'; '.join(troubles)}): delete the pod, or mend the file"
    if len(mine) < len(folders):
        taken = folders[len(mine)]
        owner = owner_of(taken) or (taken.record.uid if taken.record else "")
        return f"{what}: the newest of these devices is {taken.key}, of pod UID {owner}: delete the pod"
    return f"{what}: it was removed from the state folder. Delete the pod, so that it is allocated anew"

"""The kill of a container that did not give way while another waited for memory within that other's guarantee.

The swap policy decides that (`vgpu.memory.swap.timeouts`). All processes of the container are killed, by its cgroup; where it has none of its own, as a run of
`tangramctl run`, those that are connected.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, NamedTuple

import structlog

from arbiter import host
from vgpu.api.cgroup import CgroupOwner
from vgpu.api.grant import Grant
from vgpu.protocol.status import KillStatus

MIB: Final = 2**20
_log = structlog.get_logger()


class Excess(NamedTuple):
    """What a container has on the GPU on which it is furthest above its guarantee, and that guarantee. Bytes."""

    gpu: str
    bytes: int
    guarantee_bytes: int


class KnownProcess(NamedTuple):
    """A connected process."""

    pid: int
    started: int
    leased_bytes: int


def kill_container(
    grant: Grant, place: CgroupOwner, connected: Iterable[KnownProcess], excess: Excess, reason: str
) -> KillStatus | None:
    """Kill its processes. Returns what to report, or None where none was found. `place`: the container's cgroup; without an ID = unknown."""
    known = sorted(connected, key=lambda one: -one.leased_bytes)
    command = host.command_of(known[0].pid) if known else ""  # before the process ends
    killed = [one for one in known if host.kill(one.pid, one.started)]
    count = len(killed) + (host.kill_all(place) if place.container else 0)
    if not count:
        return None
    first = killed[0] if killed else KnownProcess(0, 0, 0)
    pod = f"{grant.namespace}/{grant.pod}"
    _log.error(
        "killed all processes of a container that did not give way", pod=pod, container=grant.container, gpu=excess.gpu,
        processes=count, held_mib=excess.bytes // MIB, guarantee_mib=excess.guarantee_bytes // MIB, reason=reason,
    )  # fmt: skip
    return KillStatus(
        f"{first.pid}-{first.started}" if killed else f"{place.container}-swap", grant.uid, pod, grant.container, excess.gpu,
        first.pid, command if killed else "", excess.bytes, excess.guarantee_bytes, whole=True, reason=reason,
    )  # fmt: skip

"""Collects the facts for `vgpu.api.enforcement` on each container: from its connections, its ledger and its GPU time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import inf
from typing import Final

from arbiter.connection import Connection
from arbiter.gputime.node_scheduler import NodeScheduler
from arbiter.identity import Identity, named
from arbiter.memory.container import ServedContainer
from arbiter.server import ArbiterServer
from vgpu.api.enforcement import ContainerFacts, Enforcement, ProcessFacts, Reason, enforcement, reported
from vgpu.api.names import CLASSES


@dataclass(frozen=True, slots=True)
class TimeFacts:
    """Facts on a container that has a connection for GPU time."""

    channels: frozenset[tuple[Identity, int]] = frozenset()
    """Processes, and the GPUs on which they reported channels."""
    gated: bool = False
    partial: bool = False
    denied: Reason | None = None
    gating_points: float | None = None
    stalled_s: float = 0.0
    stall_ended_s: float = inf


NOTHING: Final = TimeFacts()


def enforcements(server: ArbiterServer) -> dict[str, Enforcement]:
    """The enforcement of every container that has a grant, by key. Called under the server's lock."""
    times = time_facts(server.scheduler) if server.scheduler is not None else None
    return {key: enforcement(_facts(server, key, one, times)) for key, one in server.containers.items()}


def time_facts(scheduler: NodeScheduler) -> dict[str, TimeFacts]:
    """By key."""
    with scheduler.lock:
        at_s = scheduler.clock()
        return {
            name: TimeFacts(
                channels=frozenset(
                    (named(process.pid, process.pid_in_container), gpu)
                    for process in container.processes.values()
                    for gpu, _ in process.channel_groups
                ),
                gated=container.joined is not None and (container.gates or container.evidence.effect.doubted),
                partial=container.obstacles.unlisted,
                denied=container.obstacles.suspending.reason,
                gating_points=container.obstacles.suspending.gating_points,
                stalled_s=scheduler.suspend_threads.silent_s(container, at_s),
                stall_ended_s=scheduler.stalls.ended_s(container.depends_on(), at_s)
                if container.joined is not None
                else inf,
            )
            for name, container in scheduler.containers.items()
        }


def _facts(
    server: ArbiterServer, key: str, container: ServedContainer, times: Mapping[str, TimeFacts] | None
) -> ContainerFacts:
    time = NOTHING if times is None else times.get(key, NOTHING)
    meter = server.node_memory.meter
    processes = (
        ProcessFacts(
            pid=connection.pid,
            reported=frozenset(map(reported, connection.reported)),
            without_channels_s=None if times is None else _without_channels_s(connection, time, container.now_s),
            recall_s=container.ledger.silent_s(connection.number, container.now_s),
            mps=container.exempt.is_mps_client(connection.pid),
        )
        for connection in container.connections.values()
        if connection.welcomed
    )
    rules, around = server.node_memory.rules, container.bypass.pids()
    unconnected = (
        ProcessFacts(pid=pid, unconnected=True, bypassing=pid in around)
        for pid in sorted(around.union(container.contexts.unconnected()))
    )
    return ContainerFacts(
        grant_readable=container.readable,
        core_percent=max((gpu.core_percent for gpu in container.grant.gpus), default=0) if container.grant else 0,
        best_effort=container.grant is not None and container.grant.service_class == CLASSES[-1],
        gated=time.gated,
        partial=time.partial,
        denied=time.denied,
        gating_points=time.gating_points,
        mps=container.exempt.mps,
        stalled_s=time.stalled_s,
        reading_s=meter.age_s(gpu.uuid for gpu in container.grant.gpus)
        if meter is not None and container.grant
        else 0.0,
        stall_ended_s=time.stall_ended_s,
        over_limit_pids=tuple(excess.offender for excess in container.over_limit.excesses),
        processes=(*processes, *unconnected),
        unattributed=not rules.visible,
    )


def _without_channels_s(connection: Connection, time: TimeFacts, at_s: float) -> float | None:
    process = named(connection.pid, connection.pid_in_container)
    begun = (since for gpu, since in connection.contexts_s.items() if (process, gpu) not in time.channels)
    return max((at_s - since for since in begun), default=None)

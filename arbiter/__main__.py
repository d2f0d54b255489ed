"""`tangram-arbiter`: read the settings, set up the log, run."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import structlog

from arbiter import host
from arbiter.gputime.node_scheduler import NodeScheduler
from arbiter.gputime.trials_file import BOOT_ID, TrialsFile, text_of
from arbiter.gputime.usage_check import UsageCheck
from arbiter.memory.attribution import Attributor
from arbiter.memory.bypass import BypassRules
from arbiter.memory.container import ContainerOptions
from arbiter.memory.contexts import NodeMemory
from arbiter.memory.device_openers import DeviceOpeners
from arbiter.memory.highest_limits import FILE as HIGHEST
from arbiter.memory.highest_limits import HighestLimits
from arbiter.memory.known_processes import FILE as FILE_OF_CONNECTED
from arbiter.memory.known_processes import KnownProcesses
from arbiter.memory.meter import Meter
from arbiter.memory.tracer import Tracer
from arbiter.memory.unlisted import UnlistedMemory
from arbiter.metrics import pages
from arbiter.node_swapping import NodeSwapping
from arbiter.nvml_source import nvml_source
from arbiter.open_files import connections_of, raise_limit
from arbiter.sensors import GpuSensors
from arbiter.server import ArbiterServer
from arbiter.settings import ArbiterSettings
from arbiter.status import StatusSocket
from arbiter.supervisor import needed, notify_ready
from arbiter.swap.node import SwapNode
from arbiter.swap.reasons import EndActions
from nvml.queries import Nvml
from nvml.supervisor import TimeLimits
from observe import collecting
from observe.access_socket import reviewed_by
from observe.log import log_json
from observe.operations import Operations, run_in_thread
from observe.options import read
from observe.refusals import Refusals
from vgpu.gputime.events import Event, Hint, Idle, Work
from vgpu.gputime.timing import Timing
from vgpu.gputime.trial_verdict import FILE
from vgpu.memory.swap.settings import SwapSettings

MIB: Final = 2**20
_log = structlog.get_logger()


def main(arguments: Sequence[str] | None = None) -> None:
    """Run until SIGTERM or SIGINT."""
    if not needed():
        return
    settings = read(ArbiterSettings, arguments)
    log_json(settings.log_level)
    try:
        limits = TimeLimits(settings.nvml_start_s, settings.nvml_call_s)
        with nvml_source(settings.nvml_socket, settings.driver_root, limits) as nvml:
            _run(settings, nvml)
    except OSError as error:
        sys.exit(f"tangram-arbiter: {error}")


@dataclass(frozen=True, slots=True)
class _Parts:
    """The parts that run beside the server's loop, each in its own thread."""

    meter: Meter
    tracer: Tracer
    openers: DeviceOpeners | None
    scheduler: NodeScheduler
    usage_check: UsageCheck | None
    sensors: GpuSensors

    def start(self) -> None:
        """Begin reading NVML and the node's processes. If a thread cannot start, the log names the missing function."""
        self.meter.start()
        try:
            self.tracer.start()
        except RuntimeError as error:
            _log.error("a process that goes around the library counts as unconnected", reason=str(error))
        try:
            if self.openers is not None:
                self.openers.start()
        except RuntimeError as error:
            _log.error("no container is named for memory that NVML lists for no process", reason=str(error))
        if self.usage_check is not None:
            self.usage_check.start()
        try:
            self.sensors.start()
        except RuntimeError as error:
            _log.error("the status shows no temperature, power and clock of GPUs", reason=str(error))

    def close(self, status: StatusSocket) -> None:
        """Resume every container, then end the threads: none stays suspended while a thread waits for NVML."""
        self.scheduler.close()
        if self.usage_check is not None:
            self.usage_check.close()
        status.close()
        self.meter.close()
        self.tracer.close()
        self.sensors.close()
        if self.openers is not None:
            self.openers.close()


def _run(settings: ArbiterSettings, nvml: Callable[[], Nvml]) -> None:
    os.umask(0o022)
    status_socket = settings.status_socket or settings.grants_dir.absolute().parent / "status.sock"
    server, parts = _build(settings, nvml, status_socket.with_name(FILE_OF_CONNECTED))
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: server.stop())
    refusals = Refusals("arbiter")
    operations = Operations(
        pages(server, settings.restarts, refusals),
        settings.metrics_host,
        settings.metrics_port,
        review=reviewed_by(settings.metrics_access_socket) if settings.metrics_access_socket else None,
        refused=refusals.of("metrics"),
    )
    run_in_thread(operations)
    status = StatusSocket(status_socket, server)
    parts.start()
    _log.info(
        "serving", grants=str(settings.grants_dir), metrics_port=operations.port, directories=len(server.containers)
    )
    collecting.set_aside()
    notify_ready()
    server.run()
    parts.close(status)
    _log.info("stopped")


def _build(settings: ArbiterSettings, nvml: Callable[[], Nvml], known: Path) -> tuple[ArbiterServer, _Parts]:
    """`known`: the file of programs that have connected."""
    connections = connections_of(settings.connections_limit, raise_limit())
    if connections < settings.connections_limit:
        _log.warning(
            "the limit of open files lowers the connections of one container",
            requested=settings.connections_limit,
            connections=connections,
        )
    grants = settings.grants_dir.absolute()
    named_in = grants if settings.grants_in_environment else None
    meter = Meter(nvml(), grants, named_in=named_in)
    tracer = _tracer(settings, nvml(), grants, known)
    verdicts = TrialsFile(settings.trials_file or grants.parent / FILE, boot_id=text_of(BOOT_ID))
    scheduler = NodeScheduler(
        lambda: server.stop(),
        _policy(settings),
        awake_s=settings.awake_ms / 1000,
        watchdog_s=settings.watchdog_ms / 1000,
        suspending=verdicts.of,
        copies=settings.suspend_copies,
        cap_unreported=settings.cap_unreported,
        processes=connections,
        observe=lambda event: _report_work(swap_node, event),
    )
    swap_node = _swap_node(settings, scheduler, lambda: server.swapping, known.parent)
    openers = DeviceOpeners(nvml()) if settings.processes_visible else None
    sensors = GpuSensors(nvml(), lambda: server.gpus())
    server = ArbiterServer(
        settings.grants_dir,
        _limits(settings, connections),
        node_memory=NodeMemory(
            meter,
            slack_bytes=settings.guard_slack_mib * MIB,
            tracer=tracer,
            rules=_rules(settings, tracer),
            highest=HighestLimits(known.with_name(HIGHEST), grants),
        ),
        scheduler=scheduler,
        sockets_dir=settings.sockets_dir,
        attributor=Attributor(visible=settings.processes_visible),
        unlisted_memory=UnlistedMemory(openers),
        swap_node=swap_node,
        sensors=sensors,
    )
    usage_check = UsageCheck(scheduler, nvml(), grants, named_in) if settings.check_usage else None
    return server, _Parts(meter, tracer, openers, scheduler, usage_check, sensors)


def _swap_node(
    settings: ArbiterSettings, scheduler: NodeScheduler, serving: Callable[[], NodeSwapping], folder: Path
) -> SwapNode | None:
    """`serving`: the server's part, which is made later. `folder`: where the records and the trace are, unless a setting names another."""
    if not settings.burst:
        return None
    records = settings.swap_dir or folder / "swap"
    records.mkdir(mode=0o700, parents=True, exist_ok=True)
    policy = SwapSettings(
        reclaim_timeout_s=settings.burst_reclaim_timeout_s,
        stranded_after_s=settings.burst_stranded_after_s,
        pool_full=settings.burst_pool_full,
    )
    return SwapNode(
        time.monotonic,
        scheduler.blocks,
        policy,
        settings.copiers_dir,
        records,
        text_of(BOOT_ID),
        lambda *missing: serving().recall(*missing),
        records / "trace.jsonl",
        owes=lambda *of: serving().owes(*of),
        actions=EndActions(settings.burst_over_limit, settings.burst_stranded),
    )


def _report_work(node: SwapNode | None, event: Event) -> None:
    """Who has work decides who gives way."""
    if node is None:
        return
    match event:
        case Work(name=name):
            node.working(name, True)
        case Idle(name=name):
            node.working(name, False)
        case Hint(name=name, in_s=in_s):
            node.announced(name, in_s)


def _tracer(settings: ArbiterSettings, nvml: Nvml, grants: Path, file: Path) -> Tracer:
    """If no grant is mounted anywhere, as for runs, a process without a mount is no evidence."""
    file.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
    known = KnownProcesses(file, text_of(BOOT_ID))
    return Tracer(nvml, known, lambda pid: host.sees_grant(pid, grants) if settings.mount_needed else None)


def _rules(settings: ArbiterSettings, tracer: Tracer) -> BypassRules:
    return BypassRules(
        settings.bypass,
        (settings.context_room_mib + settings.guard_slack_mib) * MIB,
        time.monotonic(),
        settings.bypass_quiet_s,
        settings.processes_visible,
        tracer,
    )


def _limits(settings: ArbiterSettings, connections: int) -> ContainerOptions:
    return ContainerOptions(
        recall_wait_s=settings.recall_wait_ms / 1000,
        grant_wait_s=settings.grant_wait_ms / 1000,
        grace_s=settings.grace_ms / 1000,
        connections=connections,
        mount_needed=settings.mount_needed,
        context_room_bytes=settings.context_room_mib * 2**20,
        wait_ms=settings.restart_wait_ms,
    )


def _policy(settings: ArbiterSettings) -> Timing:
    return Timing(
        frame_s=settings.frame_ms / 1000,
        grace_s=settings.idle_grace_us / 1e6,
        starve_after_s=settings.starve_after_ms / 1000,
        starve_slice_s=settings.starve_slice_ms / 1000,
    )


if __name__ == "__main__":
    main()

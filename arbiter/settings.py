"""What an operator may set, from the command line or from environment variables TANGRAM_ARBITER_<NAME>."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field

from observe.options import ProgramSettings, config
from vgpu.api.names import OverLimitAction
from vgpu.memory.bypass import DEFAULT_ACTION, QUIET_S


class ArbiterSettings(ProgramSettings):
    """Tangram's arbiter: lends the GPU memory of each grant to the processes of its container.

    The device plugin makes a directory for each allocation under the grants folder; the arbiter puts a socket into it, and the library in the container connects there. Try it without a cluster:

    mkdir -p /tmp/grants/one && tangram-arbiter --grants-dir /tmp/grants

    Every flag can be set as an environment variable, TANGRAM_ARBITER_ and its name in capitals: TANGRAM_ARBITER_GRANTS_DIR=/tmp/grants.
    """

    model_config = config("tangram-arbiter", "TANGRAM_ARBITER_")

    grants_dir: Path = Field(
        Path("/var/lib/tangram/grants"), description="folder with one directory for each allocation"
    )
    sockets_dir: Path | None = Field(
        None,
        description="folder in which each grant directory's socket gets a directory of its own; left out = the socket lies in the grant directory, and grants-dir is written to",
    )
    status_socket: Path | None = Field(
        None, description="socket of the status document; left out = status.sock beside the grants folder"
    )
    trials_file: Path | None = Field(
        None,
        description="file with the device plugin's verdicts on suspending; left out = trials.json beside the grants folder",
    )
    nvml_socket: Path | None = Field(
        None,
        description="socket through which the device plugin answers for NVML; left out = the arbiter starts a child process that reads NVML",
    )
    driver_root: Path = Field(
        Path("/"), description="where the NVIDIA driver's files are, as seen from here; without nvml-socket"
    )
    nvml_start_s: float = Field(
        120.0, gt=0, le=3600, description="seconds that the start of NVML may take; without nvml-socket"
    )
    nvml_call_s: float = Field(
        10.0, gt=0, le=600, description="seconds that a call of NVML may take; without nvml-socket"
    )
    guard_slack_mib: int = Field(
        256,
        ge=0,
        le=1_048_576,
        description="MiB by which NVML's count of a container may pass its limit before that is reported",
    )
    bypass: OverLimitAction = Field(
        DEFAULT_ACTION,
        description="what happens to a process that goes around the library, when its container passes limit, context room and slack in three readings",
    )
    bypass_quiet_s: float = Field(
        QUIET_S,
        ge=0,
        le=3600,
        description="seconds after the arbiter's start in which nothing but a report happens to it",
    )
    processes_visible: bool = Field(
        True,
        description="the arbiter sees the node's processes; if not, GPU memory outside the library is attributed to no container, which is reported",
    )
    context_room_mib: int = Field(
        192,
        ge=0,
        le=65_536,
        description="MiB kept free beside each context for code that it loads later; together at most a sixteenth of the limit",
    )
    metrics_host: str = Field("0.0.0.0", description="address that /metrics and /healthz listen on")  # noqa: S104
    metrics_port: int = Field(9403, ge=0, le=65535, description="port of /metrics and /healthz; 0 takes any free one")
    metrics_access_socket: Path | None = Field(
        None,
        description="socket through which the device plugin has bearer tokens reviewed: only clients whose token is accepted read /metrics; left out = every client that reaches the port",
    )
    recall_wait_ms: int = Field(
        50, ge=1, le=1000, description="how long an allocation waits for its siblings' unused memory"
    )
    grant_wait_ms: int = Field(
        2000, ge=0, le=10_000, description="how long a process waits for a grant not written yet"
    )
    grace_ms: int = Field(
        1000,
        ge=0,
        le=10_000,
        description="after a start, how long processes have to state what they use before new leases",
    )
    restart_wait_ms: int = Field(
        30_000,
        ge=1,
        le=600_000,
        description="how long a process waits for new memory, once per absence, while the arbiter restarts; afterwards it is refused at once",
    )
    connections_limit: int = Field(
        1024,
        ge=1,
        le=65_536,
        description="processes of one container that may be connected; at most an eighth of the files that the arbiter may have open",
    )
    mount_needed: bool = Field(
        False,
        description="serve only processes in whose mount namespace the grant directory is mounted, as a node does it for containers; processes that are not seen (another pid namespace) are served",
    )
    grants_in_environment: bool = Field(
        False,
        description="memory of a process of the arbiter's own user counts against a limit also by the TANGRAM_GRANT that it was started with, as tangramctl run starts programs; not for nodes, where containers choose their environment",
    )
    frame_ms: int = Field(50, ge=5, le=1000, description="one round of time slices between containers that share a GPU")
    idle_grace_us: int = Field(
        200, ge=0, le=100_000, description="how long a latency-critical container keeps the GPU after its last work"
    )
    starve_after_ms: int = Field(
        1000,
        ge=50,
        le=600_000,
        description="how long a container with work waits at most for containers of a higher class or level",
    )
    starve_slice_ms: int = Field(20, ge=1, le=1000, description="the time slice that it then gets")
    watchdog_ms: int = Field(
        100,
        ge=0,
        le=60_000,
        description="a container that is allowed to run and whose work does not end for so long is resumed again, in case another process has stopped it; 0 = never",
    )
    suspend_copies: bool = Field(
        False,
        description="stop the copy channels of best-effort containers together with their compute channels",
    )
    check_usage: bool = Field(
        True,
        description="compare the work that containers report with what NVML counts for their processes, once a second; log, metric and status name containers with unreported work",
    )
    cap_unreported: bool = Field(
        False,
        description="unreported work that check-usage finds counts against the container: it is scheduled as best-effort with work; on a GPU, containers that report all their work were found, too",
    )
    restarts: int = Field(
        0, ge=0, description="how often tangram-arbiter-supervisor has started the arbiter again; it sets this"
    )
    awake_ms: int = Field(
        100,
        ge=0,
        le=60_000,
        description="how long a GPU's thread sleeps no longer than 0.1 ms at a time after the last report of a latency-critical container: its next request is served 0.1 ms sooner, for a twentieth of a processor core meanwhile; 0 = it sleeps until something comes",
    )
    burst: bool = Field(
        False,
        description="move GPU memory above the guarantees to the node's host pool when a GPU is short; under development: leave it off",
    )
    burst_reclaim_timeout_s: float = Field(
        10.0,
        gt=0,
        le=600,
        description="seconds that a container has to give way to one that waits for its guarantee; then it is over its limit",
    )
    burst_over_limit: Literal["kill", "report"] = Field(
        "kill", description="what happens to a container that does not give way in that time"
    )
    burst_stranded: Literal["evict", "keep"] = Field(
        "evict",
        description="what happens to a container whose memory cannot come back, because the guarantees of others need the GPU or memory of others cannot be moved",
    )
    burst_stranded_after_s: float = Field(
        300.0, gt=0, le=86_400, description="seconds after which such a container is stranded"
    )
    burst_pool_full: Literal["refuse", "delay"] = Field(
        "delay",
        description="what happens to a request above the guarantee while the host pool has no room: it is refused, or waits as long as its container allows",
    )
    copiers_dir: Path = Field(
        Path("/var/lib/tangram/copiers"),
        description="folder of the copiers' sockets, GPU UUID.sock, and of the host pool's status",
    )
    swap_dir: Path | None = Field(
        None,
        description="folder for the records of what is in the host pool, which outlive the arbiter; left out = swap beside the status socket",
    )

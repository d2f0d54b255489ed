"""What an operator may set, from the command line or from environment variables TANGRAM_HOSTPOOL_<NAME>."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field, field_validator

from observe.options import ProgramSettings, config
from vgpu.api.errors import BadRequest
from vgpu.api.host_pool import SHARED_GPUS, STATUS
from vgpu.api.quantity import whole_number
from vgpu.memory.pool_shares import GRAIN_BYTES


class HostPoolSettings(ProgramSettings):
    """Tangram's host pool: memory of the node to which the arbiter swaps GPU memory of containers that burst.

    It starts one tangram-copier for each GPU that is shared, and again when one ends. The pool's files outlive it: no container's memory is lost when it ends.

    tangram-hostpool --pool 64Gi --pool-dirs /var/lib/tangram/pool/tmpfs

    Every flag can be set as an environment variable, TANGRAM_HOSTPOOL_ and its name in capitals: TANGRAM_HOSTPOOL_POOL=64Gi.
    """

    model_config = config("tangram-hostpool", "TANGRAM_HOSTPOOL_")

    pool: str = Field(description="size of the pools of all GPUs together, such as 64Gi (required)")
    reserve: str = Field("4Gi", description="memory of the node that the pool leaves: a larger pool is refused")
    pool_dirs: list[Path] = Field(
        [Path("/var/lib/tangram/pool/tmpfs")],
        min_length=1,
        max_length=4,
        description="folders for the pools' files, on a hugetlbfs or a tmpfs that outlives this program; the first that has room is used",
    )
    copiers_dir: Path = Field(
        Path("/var/lib/tangram/copiers"),
        description="folder of the copiers' sockets, GPU UUID.sock, and of status.json",
    )
    shared_gpus: Path = Field(
        Path("/var/lib/tangram/plugin") / SHARED_GPUS,
        description="file in which the device plugin names the GPUs that are shared",
    )
    copier: Path = Field(
        Path("/opt/tangram/lib/tangram-copier"), description="the program that is started for each GPU"
    )
    driver_root: Path = Field(Path("/"), description="where the NVIDIA driver's files are, as seen from here")
    stall_s: float = Field(
        300.0,
        gt=0,
        le=86_400,
        description="seconds without progress after which a copier that is not ready is killed and started again",
    )
    end_s: float = Field(
        20.0,
        gt=0,
        le=600,
        description="seconds that copiers have to answer their jobs at the end; then they are killed",
    )
    pod_uid: str = Field(
        "",
        description="UID of the pod that this runs in: the arbiter does not report its copiers as memory without a grant",
    )
    metrics_host: str = Field("0.0.0.0", description="address that /metrics, /healthz and /readyz listen on")  # noqa: S104
    metrics_port: int = Field(
        9404, ge=0, le=65535, description="port of /metrics, /healthz and /readyz; 0 takes any free one"
    )
    metrics_access_socket: Path | None = Field(
        None,
        description="socket through which the device plugin has bearer tokens reviewed: only clients whose token is accepted read /metrics; left out = every client that reaches the port",
    )

    @field_validator("pool")
    @classmethod
    def _is_a_size(cls, text: str) -> str:
        if _bytes(text, "pool") < GRAIN_BYTES:
            raise ValueError(f"pool is {text}: it must be at least {GRAIN_BYTES >> 20}Mi")
        return text

    @field_validator("reserve")
    @classmethod
    def _is_a_reserve(cls, text: str) -> str:
        if text != "0":
            _bytes(text, "reserve")
        return text

    @property
    def pool_bytes(self) -> int:
        """Of all GPUs together."""
        return _bytes(self.pool, "pool")

    @property
    def reserve_bytes(self) -> int:
        """That the pool leaves to the node."""
        return 0 if self.reserve == "0" else _bytes(self.reserve, "reserve")

    @property
    def status_file(self) -> Path:
        """Where the device plugin and the arbiter read why there is no pool."""
        return self.copiers_dir / STATUS


def _bytes(text: str, what: str) -> int:
    try:
        return whole_number(text, what=what)
    except BadRequest as error:
        raise ValueError(str(error)) from None

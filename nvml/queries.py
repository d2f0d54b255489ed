"""Queries to NVML, through whatever carries a request: a supervisor in this process, or the server of another one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol, TypeVar

from nvml.errors import NvmlAway, NvmlError
from nvml.messages import (
    AnyReply,
    AnyRequest,
    Busy,
    CountReply,
    CountRequest,
    DescriptorsReply,
    DescriptorsRequest,
    ErrorReply,
    GpuAtRequest,
    GpuReply,
    HealthReply,
    HealthRequest,
    MapsReply,
    MapsRequest,
    MigCreatedReply,
    MigCreateRequest,
    MigDestroyedReply,
    MigDestroyRequest,
    MigInstanceFacts,
    MigModeReply,
    MigModeRequest,
    MigReply,
    MigRequest,
    ProcessesReply,
    ProcessesRequest,
    ProcessUsage,
    UtilisationReply,
    UtilisationRequest,
    XidsReply,
    XidsRequest,
)
from vgpu.api.inventory import Gpu

R = TypeVar("R", bound=AnyReply)
K = TypeVar("K", int, str)


class Carrier(Protocol):
    """Carries requests to a child."""

    def call_all(self, requests: Sequence[AnyRequest]) -> Sequence[AnyReply]:
        """A reply for each, `ErrorReply` instead of an answer. Never waits for long. Raises NvmlAway."""


class Nvml:
    """Every method raises NvmlError; NvmlHung where a call about this GPU does not return; NvmlAway where no child answers."""

    def __init__(self, carrier: Carrier) -> None:
        self._carrier = carrier

    def count(self) -> CountReply:
        """How many GPUs there are, and the driver's version."""
        return self._call(CountRequest(), CountReply)

    def gpu_at(self, index: int, uuid: str = "") -> Gpu:
        """The GPU with this index; its links by the PCI bus of the peer. `uuid`: of the GPU that was there before."""
        return self._call(GpuAtRequest(index, uuid), GpuReply).gpu

    def gpus_at(self, before: Mapping[int, str]) -> dict[int, Gpu | NvmlError]:
        """The same of several GPUs, side by side. `before`: index -> UUID of the GPU that was there, empty = none. Raises NvmlAway, also where one of them hangs."""
        found = self._call_all({index: GpuAtRequest(index, uuid) for index, uuid in before.items()}, GpuReply)
        return {index: one if isinstance(one, NvmlError) else one.gpu for index, one in found.items()}

    def answers(self, uuid: str) -> str | None:
        """None when the GPU answers; else the reason, for a person."""
        return self.health(uuid).trouble

    def health(self, uuid: str) -> HealthReply:
        """Whether the GPU answers, and what its sensors show."""
        return self._call(HealthRequest(uuid), HealthReply)

    def health_of(self, uuids: Iterable[str]) -> dict[str, HealthReply | NvmlError]:
        """The same of several GPUs. A device plugin's server answers with what it read last. Raises NvmlAway only."""
        return self._call_all({uuid: HealthRequest(uuid) for uuid in uuids}, HealthReply)

    def processes(self, uuid: str) -> tuple[ProcessUsage, ...]:
        """Every process with a context on the GPU, by host pid."""
        return self._call(ProcessesRequest(uuid), ProcessesReply).processes

    def held_of(self, uuids: Iterable[str]) -> dict[str, ProcessesReply | NvmlError]:
        """The same of several GPUs, and the memory in use, each as if it was queried alone. Raises NvmlAway only."""
        return self._call_all({uuid: ProcessesRequest(uuid) for uuid in uuids}, ProcessesReply)

    def busy(self, uuid: str, since_us: int, until_us: int) -> Busy:
        """The processes that computed on a GPU after `since_us`, 0 = in all that the driver remembers. Samples of after `until_us` are left out."""
        return self._call(UtilisationRequest(uuid, since_us, until_us), UtilisationReply).busy

    def mapped(self, processes: tuple[tuple[int, int], ...]) -> tuple[bool | None, ...]:
        """Which of these have the library in their memory, by host pid and start; None where unknown. At most `MOST_MAPS`."""
        found = self._call(MapsRequest(processes), MapsReply).mapped
        if len(found) != len(processes):
            raise NvmlAway(f"the answer about {len(processes)} processes is about {len(found)}")
        return found

    def gpu_open(self, processes: tuple[tuple[int, int], ...]) -> tuple[bool | None, ...]:
        """Which of these have a GPU's device file open, by host pid and start; None where unknown. At most `MOST_MAPS`."""
        found = self._call(DescriptorsRequest(processes), DescriptorsReply).opens
        if len(found) != len(processes):
            raise NvmlAway(f"the answer about {len(processes)} processes is about {len(found)}")
        return found

    def busy_of(self, since_us: Mapping[str, int], until_us: int) -> dict[str, Busy | NvmlError]:
        """The same of several GPUs, each since its own time. Raises NvmlAway only."""
        found = self._call_all(
            {uuid: UtilisationRequest(uuid, since, until_us) for uuid, since in since_us.items()}, UtilisationReply
        )
        return {uuid: one if isinstance(one, NvmlError) else one.busy for uuid, one in found.items()}

    def xids(self, uuids: tuple[str, ...]) -> XidsReply:
        """XID events since the last call."""
        return self._call(XidsRequest(uuids), XidsReply)

    def mig(self, uuid: str, *, brief: bool = False) -> MigReply:
        """MIG mode, profiles and instances of a GPU, or in brief as `MigRequest` has it."""
        return self._call(MigRequest(uuid, brief), MigReply)

    def set_mig_mode(self, uuid: str, on: bool) -> bool:
        """Switch MIG mode of an idle GPU. False: it is pending until the GPU is reset."""
        return self._call(MigModeRequest(uuid, on), MigModeReply).active

    def create_mig(self, uuid: str, profile: int, start: int) -> MigInstanceFacts:
        """A GPU instance of the profile with this number, at this memory slice, with its compute instance."""
        return self._call(MigCreateRequest(uuid, profile, start), MigCreatedReply).instance

    def destroy_mig(self, uuid: str, instance: int) -> None:
        """Remove an idle GPU instance, by its ID, and its compute instances."""
        self._call(MigDestroyRequest(uuid, instance), MigDestroyedReply)

    def _call(self, request: AnyRequest, kind: type[R]) -> R:
        (reply,) = self._carrier.call_all((request,))
        found = _understood(request, reply, kind)
        if isinstance(found, NvmlError):
            raise found
        return found

    def _call_all(self, requests: Mapping[K, AnyRequest], kind: type[R]) -> dict[K, R | NvmlError]:
        replies = self._carrier.call_all(tuple(requests.values()))
        found = {key: _understood(requests[key], reply, kind) for key, reply in zip(requests, replies, strict=True)}
        for one in found.values():
            if isinstance(one, NvmlAway):
                raise one
        return found


def _understood(request: AnyRequest, reply: AnyReply, kind: type[R]) -> R | NvmlError:
    if isinstance(reply, ErrorReply):
        return reply.error
    if not isinstance(reply, kind):
        return NvmlAway(f"the answer to {type(request).__name__} is {type(reply).__name__}: must be {kind.__name__}")
    return reply

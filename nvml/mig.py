"""MIG of one GPU through NVML: what it has, and the single steps that change it. Decides nothing: `vgpu.mig.plan` does.

A step that fails leaves what was there before it, or is an NvmlHalf. If the process is killed between the two halves of `create`, a GPU instance without a
compute instance is left, too, which `state` reports as incomplete.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any, Final

from nvml import handles
from nvml.binding import nv
from nvml.errors import NvmlError, NvmlHalf
from nvml.messages import MigInstanceFacts, MigReply
from nvml.naming import naming
from vgpu.api.mig import MigProfile, resource_form

MOST_PLACES: Final = 64
"""Of a profile, and instances of one. Specified: at most 8 so far."""


def state(uuid: str) -> MigReply:
    """Mode, profiles and instances of a GPU. Raises NvmlError."""
    with naming(f"MIG of GPU {uuid}"):
        gpu = handles.of_uuid(uuid)
        device_id = f"0x{int(nv.nvmlDeviceGetPciInfo(gpu).pciDeviceId):08x}"
        name = str(nv.nvmlDeviceGetName(gpu))
        try:
            now, pending = map(bool, nv.nvmlDeviceGetMigMode(gpu))
        except nv.NVMLError_NotSupported:
            return MigReply(device_id, name)
        infos = tuple(_profiles(gpu)) if now else ()
        profiles = tuple(_profile(gpu, info) for info in infos)
        devices = tuple(_devices(gpu)) if now else ()
        instances = tuple(_instance(one, profiles, devices) for info in infos for one in _instances(gpu, int(info.id)))
    return MigReply(device_id, name, True, now, pending, profiles, instances)


def brief(uuid: str) -> MigReply:
    """Mode and MIG devices of a GPU, in a tenth of the calls of `state`: whether anything changed, but for GPU instances without a compute instance. Raises NvmlError."""
    with naming(f"MIG of GPU {uuid}"):
        gpu = handles.of_uuid(uuid)
        try:
            now, pending = map(bool, nv.nvmlDeviceGetMigMode(gpu))
        except nv.NVMLError_NotSupported:
            return MigReply("", "")
        devices = tuple(_handles(gpu)) if now else ()
        found = ((int(nv.nvmlDeviceGetGpuInstanceId(one)), str(nv.nvmlDeviceGetUUID(one))) for one in devices)
        instances = tuple(MigInstanceFacts(number, "", 0, (its,), True) for number, its in found)
    return MigReply("", "", True, now, pending, (), instances)


def set_mode(uuid: str, on: bool) -> bool:
    """Switch MIG mode. False: it is pending until the GPU is reset. Raises NvmlError."""
    with naming(f"MIG mode of GPU {uuid}"):
        gpu = handles.of_uuid(uuid)
        nv.nvmlDeviceSetMigMode(gpu, nv.NVML_DEVICE_MIG_ENABLE if on else nv.NVML_DEVICE_MIG_DISABLE)
        now, pending = map(bool, nv.nvmlDeviceGetMigMode(gpu))
    return now == pending == on


def create(uuid: str, profile: int, start: int) -> MigInstanceFacts:
    """A GPU instance of the profile with this number at this memory slice, and its compute instance. Raises NvmlError; then neither is there, unless it is an
    NvmlHalf."""
    with naming(f"a MIG instance of profile {profile} at slice {start} of GPU {uuid}"):
        gpu = handles.of_uuid(uuid)
        info = next((one for one in _profiles(gpu) if int(one.id) == profile), None)
        if info is None:
            raise NvmlError(f"GPU {uuid} has no MIG profile {profile}")
        places = {place.start: place for place in _places(gpu, profile)}
        if start not in places:
            raise NvmlError(
                f"GPU {uuid}: an instance of profile {profile} cannot begin at slice {start}, must be one of {sorted(places)}"
            )
        made = nv.nvmlDeviceCreateGpuInstanceWithPlacement(gpu, profile, ctypes.byref(places[start]))
        try:
            nv.nvmlGpuInstanceCreateComputeInstance(made, _whole_compute(made, int(info.sliceCount)))
            return _instance(made, (_profile(gpu, info),), tuple(_devices(gpu)))
        except (nv.NVMLError, NvmlError) as error:
            try:
                _remove(made)
            except (nv.NVMLError, NvmlHalf) as second:
                raise NvmlHalf(
                    f"a MIG instance of GPU {uuid} is made half: {error}; that half cannot be removed: {second}"
                ) from None
            raise


def destroy(uuid: str, number: int) -> None:
    """Remove the GPU instance with this ID, and its compute instances. The driver refuses while one is in use: then it stays. Raises
    NvmlError; NvmlHalf where the compute instances are gone and the GPU instance is not."""
    with naming(f"MIG instance {number} of GPU {uuid}"):
        gpu = handles.of_uuid(uuid)
        _remove(nv.nvmlDeviceGetGpuInstanceById(gpu, number))


def _remove(instance: Any) -> None:
    removed = 0
    try:
        for compute in _compute_instances(instance):
            nv.nvmlComputeInstanceDestroy(compute)
            removed += 1
        nv.nvmlGpuInstanceDestroy(instance)
    except nv.NVMLError as error:
        if removed:
            raise NvmlHalf(
                f"{removed} compute instances are removed, and their GPU instance is not: NVML reports {error}"
            ) from None
        raise


def _profiles(gpu: Any) -> Iterator[Any]:
    for number in range(nv.NVML_GPU_INSTANCE_PROFILE_COUNT):
        with suppress(nv.NVMLError_NotSupported, nv.NVMLError_InvalidArgument):
            yield nv.nvmlDeviceGetGpuInstanceProfileInfoV(gpu, number)


def _profile(gpu: Any, info: Any) -> MigProfile:
    places = _places(gpu, int(info.id))
    return MigProfile(
        name=resource_form(_text(info.name).removeprefix("MIG ")),
        number=int(info.id),
        compute=int(info.sliceCount),
        memory=int(places[0].size),
        starts=tuple(sorted(int(place.start) for place in places)),
        decoders=int(info.decoderCount),
        flow_engines=int(info.ofaCount),
    )


def _places(gpu: Any, profile: int) -> list[Any]:
    count = ctypes.c_uint(0)
    nv.nvmlDeviceGetGpuInstancePossiblePlacements(gpu, profile, None, ctypes.byref(count))
    found = (nv.c_nvmlGpuInstancePlacement_t * min(count.value, MOST_PLACES))()
    count.value = len(found)
    nv.nvmlDeviceGetGpuInstancePossiblePlacements(gpu, profile, found, ctypes.byref(count))
    if not count.value:
        raise NvmlError(f"the driver reports no placement of MIG profile {profile}")
    return list(found)[: count.value]


def _instances(gpu: Any, profile: int) -> list[Any]:
    return _listed(
        nv.c_nvmlGpuInstance_t, lambda found, count: nv.nvmlDeviceGetGpuInstances(gpu, profile, found, count)
    )


def _compute_instances(instance: Any) -> list[Any]:
    return [
        compute
        for info in _compute_profiles(instance)
        for compute in _listed(
            nv.c_nvmlComputeInstance_t,
            lambda found, count, number=int(info.id): nv.nvmlGpuInstanceGetComputeInstances(
                instance, number, found, count
            ),
        )
    ]


def _listed(kind: Any, listing: Callable[..., Any]) -> list[Any]:
    count, found = ctypes.c_uint(MOST_PLACES), (kind * MOST_PLACES)()
    listing(found, ctypes.byref(count))
    return [found[at] for at in range(min(count.value, MOST_PLACES))]


def _compute_profiles(instance: Any) -> Iterator[Any]:
    for number in range(nv.NVML_COMPUTE_INSTANCE_PROFILE_COUNT):
        with suppress(nv.NVMLError_NotSupported, nv.NVMLError_InvalidArgument):
            yield nv.nvmlGpuInstanceGetComputeInstanceProfileInfo(
                instance, number, nv.NVML_COMPUTE_INSTANCE_ENGINE_PROFILE_SHARED, version=1
            )


def _whole_compute(instance: Any, slices: int) -> int:
    """Number of the compute profile that takes all of the GPU instance."""
    whole = next((one for one in _compute_profiles(instance) if int(one.sliceCount) == slices), None)
    if whole is None:
        raise NvmlError(f"the driver reports no compute instance of {slices} slices")
    return int(whole.id)


def _devices(gpu: Any) -> Iterator[tuple[int, str, bool]]:
    """(GPU instance, UUID, is it as large as that) of each MIG device."""
    for device in _handles(gpu):
        attributes = nv.nvmlDeviceGetAttributes_v2(device)
        whole = int(attributes.computeInstanceSliceCount) == int(attributes.gpuInstanceSliceCount)
        yield int(nv.nvmlDeviceGetGpuInstanceId(device)), str(nv.nvmlDeviceGetUUID(device)), whole


def _handles(gpu: Any) -> Iterator[Any]:
    for at in range(int(nv.nvmlDeviceGetMaxMigDeviceCount(gpu))):
        with suppress(nv.NVMLError_NotFound, nv.NVMLError_InvalidArgument):
            yield nv.nvmlDeviceGetMigDeviceHandleByIndex(gpu, at)


def _instance(
    instance: Any, profiles: tuple[MigProfile, ...], devices: tuple[tuple[int, str, bool], ...]
) -> MigInstanceFacts:
    info = nv.nvmlGpuInstanceGetInfo(instance)
    number = int(info.id)
    profile = next((one.name for one in profiles if one.number == int(info.profileId)), "")
    its = [(uuid, whole) for of, uuid, whole in devices if of == number]
    return MigInstanceFacts(
        number,
        profile,
        int(info.placement.start),
        tuple(uuid for uuid, _ in its),
        [whole for _, whole in its] == [True],
    )


def _text(name: Any) -> str:
    return name.decode(errors="replace") if isinstance(name, bytes) else str(name)

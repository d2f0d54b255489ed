"""Bursts: which annotations count for which container, what a GPU can give, and the file."""

from __future__ import annotations

from fractions import Fraction
from math import floor

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.builders import gpu
from vgpu.api.burst import (
    MAX,
    Burst,
    BurstBound,
    BurstLimits,
    burst_from_text,
    burst_to_text,
    bursts_of,
    contradiction,
    limits_on_gpus,
)
from vgpu.api.errors import BadDocument, BadRequest, NewerVersion
from vgpu.api.grant import AssignedGpu, GrantGpu
from vgpu.api.names import DEFAULT
from vgpu.api.quantity import LARGEST_GPU_MIB, parse
from vgpu.api.request import GpuRequest, PodRequest

MEM, CORE, WAIT = DEFAULT.burst_annotations
LARGEST = 80 * 1024
"""MiB of the largest GPU in these tests."""
FREE = BurstBound()


def share(name: str = "main", mib: int = 8192, gpus: int = 1, core: int = 0) -> GpuRequest:
    return GpuRequest(name, "share", gpus, units=mib * gpus // 1024, mib=mib, core_percent=core)


def bursts(annotations: dict[str, str], *parts: GpuRequest, bound: BurstBound = FREE) -> dict[str, Burst]:
    return bursts_of(annotations, PodRequest(parts or (share(),)), largest_gpu_mib=LARGEST, bound=bound)


def test_without_annotations_nothing_bursts() -> None:
    assert (
        bursts({DEFAULT.gpu_count: "1", f"{MEM}.": "9Gi", f"{MEM}s": "9Gi", "other.example/gpu-mem-burst": "1"}) == {}
    )


@pytest.mark.parametrize(
    ("key", "parts"),
    [
        (MEM, (MEM, "")),
        (f"{MEM}.main", (MEM, "main")),
        (f"{WAIT}.a-b", (WAIT, "a-b")),
        (f"{MEM}.", None),
        (f"{MEM}s", None),
        (DEFAULT.gpu_mem, None),
    ],
)
def test_a_key_is_of_a_pod_or_of_a_container(key: str, parts: tuple[str, str] | None) -> None:
    assert DEFAULT.burst_annotation(key) == parts


@pytest.mark.parametrize(
    ("text", "gpus", "mib"),
    [
        ("40Gi", 1, 40 * 1024), ("40", 1, 40 * 1024), ("8Gi", 1, 8192), (MAX, 1, LARGEST_GPU_MIB), ("80Gi", 1, LARGEST),
        ("42949672961", 1, 40 * 1024), ("40Gi", 2, 20 * 1024), ("16385Mi", 2, 8192), (MAX, 2, LARGEST_GPU_MIB),
    ],
)  # fmt: skip
def test_memory_is_read_as_gpu_mem_and_split_over_the_gpus(text: str, gpus: int, mib: int) -> None:
    assert bursts({MEM: text}, share(gpus=gpus)) == {"main": Burst(mib, 0)}


def test_a_containers_own_annotation_replaces_the_pods_key_by_key() -> None:
    annotations = {MEM: "16Gi", WAIT: "5", f"{MEM}.b": "max", f"{WAIT}.c": "0", f"{CORE}.c": "90"}
    found = bursts(annotations, share("a"), share("b"), share("c", core=30))
    assert found == {"a": Burst(16 * 1024, 0, 5), "b": Burst(LARGEST_GPU_MIB, 0, 5), "c": Burst(16 * 1024, 90, 0)}


def test_only_the_container_that_is_named_bursts_and_whole_gpus_beside_it_do_not_matter() -> None:
    whole = GpuRequest("w", "whole", 1, core_percent=100)
    assert bursts({f"{MEM}.a": MAX}, share("a"), share("b"), whole).keys() == {"a"}
    assert bursts({MEM: MAX}, share("a"), share("b"), whole).keys() == {"a", "b"}


def test_compute_bursts_where_it_is_capped_and_its_memory_stays() -> None:
    found = bursts({CORE: "80"}, share("a", core=30), share("b"))
    assert found == {"a": Burst(8192, 80), "b": Burst(8192, 0)}
    assert bursts({CORE: "160"}, share(core=30, gpus=2)) == {"main": Burst(8192, 80)}


@pytest.mark.parametrize(
    ("annotations", "parts", "why"),
    [
        ({MEM: "7Gi"}, [share()], "gpu-mem-burst is 7Gi, which is 7168 MiB: for container main it must be 8192 MiB, its guarantee, to 81920 MiB, or max"),
        ({MEM: "81Gi"}, [share()], "is 82944 MiB: .* to 81920 MiB, or max"),
        ({MEM: "15Gi"}, [share(gpus=2)], "must be 16384 MiB, its guarantee, to 163840 MiB over 2 GPUs, or max"),
        ({MEM: "9Gi"}, [share("a"), share("b", 16384)], "for container b it must be 16384"),
        ({MEM: "8gb"}, [share()], "annotation tangram.sh/gpu-mem-burst: '8gb' is not a Kubernetes quantity.*; it may also be max"),
        ({MEM: ""}, [share()], "not a Kubernetes quantity"),
        ({MEM: "0"}, [share()], "is 0: it must be a whole number, 1 or more; it may also be max"),
        ({MEM: "9.5"}, [share()], "must be a whole number"),
        ({MEM: "Max"}, [share()], "'Max' is not"),
        ({f"{MEM}.b": "9Gi"}, [share("a")], "gpu-mem-burst.b names container 'b': it must be one that requests tangram.sh/gpu-mem, a"),
        ({MEM: "9Gi"}, [GpuRequest("w", "whole", 1)], "only a share can burst; whole GPUs and MIG instances cannot"),
        ({f"{MEM}.m": "9Gi"}, [GpuRequest("m", "mig", 1, profile="1g.10gb"), share("a")], "names container 'm'"),
        ({CORE: "20"}, [share(core=30)], "is 20: for container main it must be 30, its guarantee, to 100"),
        ({CORE: "101"}, [share(core=30)], "must be a whole number, 1 to 100"),
        ({CORE: "151"}, [share(core=30, gpus=2)], "is 151: it does not divide over the 2 GPUs of container main"),
        ({CORE: "max"}, [share(core=30)], "'max' is not a Kubernetes quantity"),
        ({CORE: "90"}, [share()], "requests no tangram.sh/gpu-core, so its compute time has no limit to exceed"),
        ({f"{CORE}.a": "90"}, [share("a"), share("b", core=5)], "requests no tangram.sh/gpu-core"),
        ({MEM: MAX, WAIT: "3601"}, [share()], "gpu-mem-burst-wait is '3601': it must be a whole number of seconds, 0 to 3600"),
        ({MEM: MAX, WAIT: "-1"}, [share()], "whole number of seconds"),
        ({MEM: MAX, WAIT: "٣"}, [share()], "whole number of seconds"),
        ({MEM: MAX, WAIT: "9" * 9999}, [share()], "whole number of seconds"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused_with_object_value_and_range(
    annotations: dict[str, str], parts: list[GpuRequest], why: str
) -> None:
    with pytest.raises(BadRequest, match=why):
        bursts(annotations, *parts)


@pytest.mark.parametrize(
    ("most", "text", "why"),
    [
        ({"a": "16Gi"}, "16Gi", ""),
        (
            {"a": "16Gi"},
            "17Gi",
            "is 17Gi: a container of namespace a may have 16Gi at most \\(chart value burst.max\\)",
        ),
        ({"a": "16Gi"}, MAX, "is max: a container of namespace a may have 16Gi at most"),
        ({"a": "max", "*": "1Gi"}, MAX, ""),
        ({"*": "16Gi"}, "17Gi", "may have 16Gi at most"),
        ({}, MAX, ""),
        ({"b": MAX}, "9Gi", "pods of namespace a may not burst; .* chart value burst.max"),
    ],
)
def test_a_namespace_bounds_what_its_pods_write(most: dict[str, str], text: str, why: str) -> None:
    bound = BurstBound.of("a", most)
    if not why:
        assert bursts({MEM: text}, bound=bound)
        return
    with pytest.raises(BadRequest, match=why):
        bursts({MEM: text}, bound=bound)


texts = st.sampled_from([MAX, "1", "8", "9", "16Gi", "17000Mi", "80Gi", "81Gi", "1Ti", "", "x", "9.5Gi", "8.5"])


@given(texts, st.integers(1, 3), st.sampled_from([None, "1", "12", "16Gi", "400Gi", MAX]))
def test_memory_is_what_the_plain_arithmetic_says(text: str, gpus: int, most: str | None) -> None:
    def total(quantity: str) -> Fraction | None:
        value = parse(quantity)
        return (value / 2**20 if value >= 2**20 else value * 1024) if value.denominator == 1 else None

    try:
        wanted = None if text == MAX else total(text)
        sound = text == MAX or (wanted is not None and 8192 * gpus <= floor(wanted) <= LARGEST * gpus)
    except BadRequest:
        wanted, sound = None, False
    bounded = most not in (None, MAX)
    allowed = most is not None and (not bounded or (wanted is not None and floor(wanted) <= (total(str(most)) or 0)))
    try:
        found = bursts({MEM: text}, share(gpus=gpus), bound=BurstBound("a", most))["main"].mib
    except BadRequest:
        assert not (sound and allowed)
        return
    assert sound
    assert allowed
    assert found == (LARGEST_GPU_MIB if wanted is None else floor(wanted) // gpus)


def piece(row: int, mib: int, core: int = 0) -> AssignedGpu:
    return AssignedGpu(gpu(row).uuid, row, mib, core)


rooms = st.none() | st.integers(0, 100)


@given(
    st.lists(rooms, min_size=1, max_size=3),
    st.integers(8, 90) | st.just(LARGEST_GPU_MIB),
    st.integers(0, 100),
    st.integers(0, 100),
)
def test_a_limit_is_never_below_the_guarantee_nor_above_what_is_there_and_above_on_all_gpus_or_none(
    room: list[int | None], burst_mib: int, core: int, burst_core: int
) -> None:
    assigned = [piece(row, 8, core) for row in range(len(room))]
    there = {one.uuid: mib for one, mib in zip(assigned, room, strict=True) if mib is not None}
    found, why = limits_on_gpus(Burst(burst_mib, burst_core), assigned, there)
    least_room = min(there.get(one.uuid, 0) for one in assigned)
    bursts_in_memory = burst_mib > 8 and least_room > 8
    bursts_in_time = 0 < core < burst_core
    assert (found is not None) == (bursts_in_memory or bursts_in_time)
    for one, limit in zip(assigned, found.gpus if found else (), strict=bool(found)):
        assert limit.uuid == one.uuid
        assert limit.mib == (min(burst_mib, there[one.uuid]) if bursts_in_memory else 8)
        assert limit.core_percent == (max(core, burst_core) if core else 0)
    if found:
        assert contradiction(found, [GrantGpu(one.uuid, one.mib, one.core_percent) for one in assigned]) is None
        assert burst_from_text(burst_to_text(found)) == found
    asked_for_more = burst_mib > least_room if burst_mib < LARGEST_GPU_MIB else least_room <= 8
    assert bool(why) == (burst_mib > 8 and asked_for_more)


def test_why_a_limit_is_lower_names_gpu_and_figures() -> None:
    one = piece(0, 8192)
    assert limits_on_gpus(Burst(40960, 0), [one], {one.uuid: 20480})[1] == (
        f"40960 MiB are requested of GPU {one.uuid}, which has 20480 MiB beside the guarantees of other containers: that is the limit"
    )
    assert "has no memory beside the guarantees" in limits_on_gpus(Burst(LARGEST_GPU_MIB, 0), [one], {})[1]


UUID = gpu(0).uuid
TEXT = f"tangram-burst 1\nwait_s 30\ncard {UUID} mib=40960 core_percent=80\nend\n"


def test_the_file_is_as_documented() -> None:
    assert burst_to_text(BurstLimits((GrantGpu(UUID, 40960, 80),))) == TEXT
    assert burst_from_text(TEXT) == BurstLimits((GrantGpu(UUID, 40960, 80),), 30)


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        ("burst 1", "burst 2", "burst is of version '2': this Tangram reads version 1"),
        ("tangram-burst", "tangram-grant", "burst line 1: found 'tangram-grant 1'"),
        ("wait_s 30", "wait_s 3601", "burst line 2: wait_s is '3601': it must be a whole number of seconds, 0 to 3600"),
        ("wait_s 30", "wait_s 030", "no leading zero"),
        ("wait_s 30\n", "", "burst line 2: found"),
        ("mib=40960", "mib=0", "burst line 3: mib is 0: it must be 1 to 16777215"),
        ("mib=40960", "mib=16777216", "mib is 16777216"),
        ("core_percent=80", "core_percent=101", "core_percent is 101"),
        ("end\n", "end", "burst line 4: 'end' has no line break after it: it was cut off"),
        ("end\n", "end\nx", "burst line 5: found text after 'end'"),
        ("end\n", "", "burst line 4: found ''"),
        ("end\n", f"card {UUID} mib=1 core_percent=0\nend\n", "stands twice"),
        (f"card {UUID} mib=40960 core_percent=80\n", "", "burst line 3: found 'end' after 0 GPUs"),
        ("end\n", "x" * 70_000, "at most 65536 are read"),
    ],
)
def test_what_is_not_the_file_is_refused_by_line(old: str, new: str, why: str) -> None:
    assert old in TEXT
    with pytest.raises(BadDocument, match=why) as refused:
        burst_from_text(TEXT.replace(old, new))
    assert isinstance(refused.value, NewerVersion) == ("burst 2" in new)


@pytest.mark.parametrize(
    ("limit", "why"),
    [
        (GrantGpu(UUID, 8192, 30), None),
        (GrantGpu(UUID, 9000, 100), None),
        (GrantGpu(UUID, 8191, 30), "mib of GPU .* is 8191: it must be 8192, the grant's, or more"),
        (GrantGpu(UUID, 9000, 29), "core_percent of GPU .* is 29: it must be 30 to 100"),
        (GrantGpu(UUID, 9000, 0), "it must be 30 to 100"),
        (GrantGpu(gpu(1).uuid, 9000, 30), "must be one of the grant"),
    ],
)
def test_limits_that_contradict_the_grant_are_found(limit: GrantGpu, why: str | None) -> None:
    found = contradiction(BurstLimits((limit,)), [GrantGpu(UUID, 8192, 30)])
    if why is None:
        assert found is None
        return
    assert found is not None
    with pytest.raises(BadDocument, match=why):
        raise BadDocument(found)


def test_a_cap_where_the_grant_has_none_is_a_contradiction() -> None:
    assert "0, as the grant has no cap" in (
        contradiction(BurstLimits((GrantGpu(UUID, 9000, 5),)), [GrantGpu(UUID, 1, 0)]) or ""
    )

"""Which GPU a run is given, against the obvious slow version; and the error when there is none."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tangramctl.choose import RunAllocation, choose
from tangramctl.errors import BadOption, NoCapacity
from tangramctl.request import gpus_named, memory_mib, request
from vgpu.api.grant import AssignedGpu
from vgpu.api.inventory import Gpu, Inventory

LETTERS = "abcdef0123"


def gpu(index: int, mib: int) -> Gpu:
    return Gpu(f"GPU-{LETTERS[index] * 8}-0000-0000-0000-000000000000", index, "T4", mib)


def machine(*sizes_mib: int) -> Inventory:
    return Inventory(tuple(gpu(index, mib) for index, mib in enumerate(sizes_mib)), unit_mib=1)


def holding(of: Gpu, mib: int, core_percent: int = 0) -> RunAllocation:
    return RunAllocation(AssignedGpu(of.uuid, of.index, mib, core_percent), "pid 1, x")


def preference(mib: int, core_percent: int = 0, uuids: Sequence[str] = ()) -> object:
    return request(mib, core_percent, "standard", 2, frozenset(uuids))


@given(
    st.lists(st.integers(1, 100), min_size=1, max_size=5),
    st.lists(st.tuples(st.integers(0, 4), st.integers(1, 60), st.integers(0, 60)), max_size=6),
    st.integers(1, 120),
    st.integers(0, 100),
)
def test_the_gpu_with_least_left_that_fits_the_request_is_chosen(
    sizes: list[int], held: list[tuple[int, int, int]], mib: int, core: int
) -> None:
    here = machine(*sizes)
    holdings = [holding(here.gpus[at % len(sizes)], much, percent) for at, much, percent in held]
    free = {one.uuid: [one.mib, 100] for one in here.gpus}
    for one in holdings:
        free[one.assigned.uuid][0] -= one.assigned.mib
        free[one.assigned.uuid][1] -= one.assigned.core_percent
    fitting = [one for one in here.gpus if free[one.uuid][0] >= mib and free[one.uuid][1] >= core]
    if fitting:
        assigned = choose(preference(mib, core), here, holdings, {})
        best = min(free[one.uuid][0] for one in fitting)
        assert assigned.uuid in {one.uuid for one in fitting}
        assert free[assigned.uuid][0] == best
        assert (assigned.mib, assigned.core_percent) == (mib, core)
    else:
        with pytest.raises(NoCapacity if mib <= max(sizes) else BadOption):
            choose(preference(mib, core), here, holdings, {})


def test_memory_of_other_processes_is_not_free() -> None:
    here = machine(1000)
    assert choose(preference(400), here, [], {here.gpus[0].uuid: 600}).mib == 400
    with pytest.raises(NoCapacity, match="600 MiB used by processes outside tangramctl"):
        choose(preference(401), here, [], {here.gpus[0].uuid: 600})


def test_only_gpus_that_were_named_are_chosen_and_spoken_of() -> None:
    here = machine(1000, 500)
    first = here.gpus[0].uuid
    assert choose(preference(400, uuids=[first]), here, [], {}).uuid == first
    with pytest.raises(NoCapacity) as caught:
        choose(preference(400, uuids=[first]), here, [holding(here.gpus[0], 700)], {})
    assert str(caught.value).splitlines() == [
        "no GPU has 400 MiB free:",
        f"  GPU 0 (T4, {first}): 300 of 1000 MiB and 100 % free",
        "    700 MiB granted to pid 1, x",
    ]


def test_unhealthy_gpus_and_gpus_in_mig_mode_are_never_chosen_and_the_error_has_the_reason() -> None:
    ill, cut = replace(gpu(0, 1000), healthy=False), replace(gpu(1, 1000), mig=True)
    well = gpu(2, 500)
    here = Inventory((ill, cut, well), unit_mib=1)
    assert choose(preference(400), here, [], {}).uuid == well.uuid
    with pytest.raises(NoCapacity, match="may not be shared"):
        choose(preference(400), here, [holding(well, 300)], {})
    with pytest.raises(BadOption, match=r"1 to 500 MiB, what GPU 2 \(T4, the largest here\) has"):
        choose(preference(600), here, [], {})
    with pytest.raises(BadOption, match="none of the 2 GPUs may be shared"):
        choose(preference(600), Inventory((ill, cut), unit_mib=1), [], {})


@pytest.mark.parametrize(
    ("text", "mib"),
    [("8Gi", 8192), ("8", 8192), ("512Mi", 512), ("1.5Gi", 1536), ("1G", 954), ("1048576", 1), ("1048577", 2)],
)
def test_memory_is_bytes_or_gib_and_rounded_up_to_mib(text: str, mib: int) -> None:
    assert memory_mib(text) == mib


@pytest.mark.parametrize("text", ["", "8GB", "-1Gi", "0", "0.5", "17000000Mi", "1e30"])
def test_other_memory_is_refused_by_option_value_and_range(text: str) -> None:
    with pytest.raises(BadOption, match="--gpu-mem"):
        memory_mib(text)


@pytest.mark.parametrize("of", [(-1, "standard", 2), (101, "standard", 2), (0, "urgent", 2), (0, "standard", 5)])
def test_numbers_out_of_range_are_refused(of: tuple[int, str, int]) -> None:
    with pytest.raises(BadOption, match=r"--(gpu-core|class|level) is .*: it must be "):
        request(1, *of, frozenset())


def test_gpus_are_named_by_index_uuid_or_the_beginning_of_one() -> None:
    here = machine(10, 10, 10)
    uuids = [one.uuid for one in here.gpus]
    assert gpus_named("1", here, "--gpu") == {uuids[1]}
    assert gpus_named(f"{uuids[0]}, GPU-c", here, "--gpu") == {uuids[0], uuids[2]}
    for wrong in ("3", "GPU-", "GPU-d", "a", "", "-1", "0,", "²"):
        with pytest.raises(BadOption, match="--gpu is"):
            gpus_named(wrong, here, "--gpu")


def test_a_gpu_in_mig_mode_cannot_be_named() -> None:
    here = Inventory((replace(gpu(0, 10), mig=True),), unit_mib=1)
    with pytest.raises(BadOption, match="MIG mode"):
        gpus_named("0", here, "--gpu")

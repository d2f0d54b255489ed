"""Which GPUs are in a machine, through any sequence of what can happen to them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vgpu.api.inventory import Gpu
from vgpu.health.presence import LateGpus, bus_address, missing, present

SLOTS = [f"0000:{bus:02x}:00.0" for bus in range(0x17, 0x1D)]


def gpu(number: int, index: int = 0, slot: str = SLOTS[0]) -> Gpu:
    return Gpu(f"GPU-{number:08d}-0000-4000-8000-000000000000", index, "NVIDIA H200", 143_771, pci=f"0000{slot}")


@pytest.mark.parametrize(
    ("text", "same"),
    [
        ("00000000:17:00.0", "0000:17:00.0"),
        ("0001:AB:00.0", "0001:ab:00.0"),
        ("00010000:3B:00.0", "10000:3b:00.0"),
        ("", ""),
    ],
)
def test_an_address_reads_the_same_from_nvml_and_from_sysfs(text: str, same: str) -> None:
    assert bus_address(text) == same


def test_a_gpu_that_was_taken_out_leaves_and_one_that_fell_off_the_bus_stays_unhealthy() -> None:
    last = [gpu(1, 0, SLOTS[0]), gpu(2, 1, SLOTS[1])]
    now = present(last, [replace(last[1], index=0)], silent=0, reopened=True, on_bus=SLOTS[1:2])
    assert [(one.uuid, one.index) for one in now.gpus] == [(last[1].uuid, 0)]
    now = present(last, [replace(last[1], index=0)], silent=0, reopened=True, on_bus=SLOTS[:2])
    assert [(one.uuid, one.index, one.healthy) for one in now.gpus] == [
        (last[1].uuid, 0, True),
        (last[0].uuid, 1, False),
    ]
    assert now.kept == {last[0].uuid}


def test_a_gpu_in_the_slot_of_another_replaces_it() -> None:
    now = present([gpu(1)], [gpu(2)], silent=0, reopened=True, on_bus=SLOTS[:1])
    assert [one.uuid for one in now.gpus] == [gpu(2).uuid]


def test_the_same_gpu_in_another_slot_is_one_gpu() -> None:
    now = present([gpu(1)], [gpu(1, 0, SLOTS[3])], silent=0, reopened=True, on_bus=SLOTS[3:4])
    assert [one.pci for one in now.gpus] == [f"0000{SLOTS[3]}"]


def test_where_the_bus_cannot_be_read_only_a_new_session_that_describes_all_removes_a_gpu() -> None:
    for silent, reopened, there in ((0, False, True), (1, True, True), (0, True, False)):
        assert bool(present([gpu(1)], [], silent=silent, reopened=reopened, on_bus=None).gpus) is there


def test_a_gpu_that_nvml_does_not_list_yet_is_missing() -> None:
    assert missing([gpu(1)], SLOTS[:2]) == {SLOTS[1]}
    assert missing([gpu(1)], None) == frozenset()


Machine = dict[str, tuple[int, bool]]
"""Slot -> the number of its GPU, and whether it answers."""


@given(
    st.lists(
        st.dictionaries(st.sampled_from(SLOTS), st.tuples(st.integers(1, 6), st.booleans()), max_size=6).filter(
            lambda machine: len({number for number, _ in machine.values()}) == len(machine)
        ),
        min_size=1,
        max_size=8,
    )
)
def test_after_any_sequence_of_machines_the_gpus_are_those_that_answer_and_those_seen_before_that_are_still_in_their_slot(
    machines: Sequence[Machine],
) -> None:
    gpus: tuple[Gpu, ...] = ()
    slow: dict[str, int] = {}
    for machine in machines:
        answering = [slot for slot in sorted(machine) if machine[slot][1]]
        described = [gpu(machine[slot][0], index, slot) for index, slot in enumerate(answering)]
        numbers = {machine[slot][0] for slot in answering}
        slow = {
            slot: number
            for slot, number in slow.items()
            if slot in machine and not machine[slot][1] and number not in numbers
        }
        before = dict(slow)
        slow |= {slot: machine[slot][0] for slot in answering}
        now = present(gpus, described, silent=0, reopened=True, on_bus=list(machine))
        assert {one.uuid for one in now.gpus} == {gpu(number).uuid for number in slow.values()}
        assert now.kept == {gpu(number).uuid for number in before.values()}
        assert len({one.index for one in now.gpus}) == len(now.gpus)
        assert all(one in now.gpus for one in described), "what NVML describes stands as it does"
        assert all(one.healthy is (one.uuid not in now.kept) for one in now.gpus)
        gpus = now.gpus


def test_nvml_is_opened_anew_for_a_missing_gpu_twice_soon_and_then_once_an_hour() -> None:
    late, opened = LateGpus(), []
    late.probed(frozenset(SLOTS[:1]), 0)
    for at_s in range(2 * 3600):
        if late.reopen(at_s):
            opened.append(at_s)
            late.probed(frozenset(SLOTS[:1]), at_s)
    assert opened == [3, 33, 3633]
    late.probed(frozenset(), 7200)
    assert late.reopen(100_000) == ""
    late.probed(frozenset(SLOTS[1:2]), 100_000)
    assert late.reopen(100_003) != "", "another GPU counts anew"

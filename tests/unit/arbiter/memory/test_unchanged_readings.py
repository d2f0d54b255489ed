"""Which readings of NVML a container skips, and that none of those would have changed anything."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from arbiter.memory.meter import SETTLED, MemoryReading, SeenProcess, UnchangedReadings
from vgpu.memory.context import CALM_S, ContextMeasure

GPU, OTHER = "GPU-1", "GPU-2"
SEEN = {1: SeenProcess(1, "a", 1), 2: SeenProcess(2, "b", 1)}


def readings(*gpus: dict[str, dict[int, int | None]], seen: dict[int, SeenProcess] = SEEN) -> list[MemoryReading]:
    """One each second, each compared with the one before."""
    reported, last = [], MemoryReading(float("-inf"))
    for at_s, gpu in enumerate(gpus):
        one = MemoryReading(float(at_s), gpu, seen)
        reported.append(one.after(last))
        last = one
    return reported


def test_a_reading_is_passed_over_after_some_that_were_alike() -> None:
    still = UnchangedReadings()
    lasts = [still.lasts(one, [GPU]) for one in readings(*[{GPU: {1: 5}}] * 10)]
    assert lasts == [False] * (SETTLED + 1) + [True] * (9 - SETTLED)
    assert SETTLED - 1 > CALM_S, "a second apart"


def test_a_word_of_a_process_and_another_number_begin_anew_and_another_gpu_does_not() -> None:
    still, quiet = UnchangedReadings(), [{GPU: {1: 5}, OTHER: {2: at}} for at in range(9)]
    reported = readings(*quiet, {GPU: {1: 6}, OTHER: {2: 9}}, *[{GPU: {1: 6}, OTHER: {2: 9}}] * 9)
    assert [still.lasts(one, [GPU]) for one in reported[:9]][-1]
    assert not still.lasts(reported[9], [GPU])
    assert [still.lasts(one, [GPU]) for one in reported[10:]][-1]
    still.moved()
    assert not still.lasts(reported[-1], [GPU])


def test_a_reading_that_was_not_taken_breaks_the_row() -> None:
    still, reported = UnchangedReadings(), readings(*[{GPU: {1: 5}}] * 12)
    lasts = [still.lasts(one, [GPU]) for one in reported if one.at_s != 9.0]
    assert lasts[8]
    assert not lasts[9]


def test_a_process_that_another_one_took_the_number_of_is_no_quiet_one() -> None:
    again = MemoryReading(1.0, {GPU: {1: 5}}, {1: SeenProcess(9, "a", 1)}).after(
        MemoryReading(0.0, {GPU: {1: 5}}, SEEN)
    )
    assert not again.unchanged
    assert readings(*[{GPU: {1: 5}}] * 2)[-1].unchanged == {GPU}


def test_a_gpu_that_did_not_answer_is_not_as_it_was() -> None:
    reported = readings({GPU: {1: 5}}, {}, {GPU: {1: 5}}, {GPU: {1: 5}})
    assert [sorted(one.unchanged) for one in reported] == [[], [], [], [GPU]]


@given(
    st.integers(0, 100),
    st.integers(0, 100),
    st.integers(0, 100),
    st.integers(0, 60),
    st.integers(1, 20),
    st.integers(0, 200),
)
def test_a_measure_is_the_same_whether_the_readings_that_are_passed_over_are_taken_or_not(
    measured: int, used: int, leased: int, charged: int, passed_over: int, later: int
) -> None:
    def measure(took: int) -> list[int]:
        one, leased_bytes = ContextMeasure(charged), max(used, leased)
        one.moved(leased_bytes)
        end_s = SETTLED + passed_over
        for at_s in [*range(SETTLED + took), *range(end_s, end_s + 4)]:
            one.read(measured if at_s < end_s else later, used, leased_bytes, float(at_s))
        return [one.bytes, one.bound_bytes]

    assert measure(0) == measure(passed_over)

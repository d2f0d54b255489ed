"""How much capacity a GPU takes with it, against counting it request by request and model by model."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tests.examples import examples
from vgpu.scheduling.demand.displacement import Demand, GpuNeed
from vgpu.scheduling.demand.pool_capacity import PoolCapacity

MODELS = ("a", "b", "c")
needs = st.builds(
    lambda mib, percent, models: GpuNeed(mib, 100 if mib < 0 else percent, tuple(sorted(models))),
    st.sampled_from((-1, 1, 10, 40, 80)), st.sampled_from((0, 25, 100)), st.sets(st.sampled_from((*MODELS, "unknown")), max_size=2),
)  # fmt: skip
gpus = st.lists(st.tuples(st.integers(0, 2), st.integers(0, 100)), min_size=1, max_size=12)


def capacity_of(models: dict[str, list[int]], mib: dict[str, int]) -> PoolCapacity:
    """Free MiB of each GPU by model, and the size of a model's GPUs."""
    capacity = PoolCapacity()
    for code, (model, free) in enumerate(models.items()):
        capacity.know(code)
        for each in free:
            capacity.add(code, mib[model])
            capacity.debit(code, mib[model] - each)
    return capacity


def demand_of(seen: dict[GpuNeed, int], models: Sequence[str]) -> Demand:
    """Each model is a pool."""
    return Demand.of(
        seen, len(models), lambda need: np.array([not need.models or one in need.models for one in models])
    )


def slow(seen: dict[GpuNeed, int], free: dict[str, list[int]], mib: dict[str, int]) -> dict[str, float]:
    """The definition, one request after another."""
    free_gpus = {model: sum(parts) / mib[model] for model, parts in free.items()}
    lost = dict.fromkeys(free, 0.0)
    for need, wanted in seen.items():
        times = {}
        for model, size in mib.items():
            possible = (not need.models or model in need.models) and free[model] and size >= max(need.mib, 1)
            by_time = 100 / need.percent if need.percent else math.inf
            times[model] = min(1.0 if need.mib < 0 else size / need.mib, by_time) if possible else 0.0
        left = sum(times[model] * free_gpus[model] for model in free)
        if left > 0:
            usable = sum(free_gpus[model] for model in free if times[model])
            for model in free:  # requested: so many times, each as large as the part of a GPU that it takes on average
                lost[model] += wanted * (usable / left) * times[model] / left
    total = sum(lost[model] * free_gpus[model] for model in free)
    return {model: each * sum(free_gpus.values()) / total if total else 1.0 for model, each in lost.items()}


@settings(max_examples=examples(200), deadline=None)
@given(st.dictionaries(needs, st.integers(1, 50), max_size=6), gpus)
def test_it_is_what_counting_request_by_request_finds(seen: dict[GpuNeed, int], placed: list[tuple[int, int]]) -> None:
    mib = {"a": 40, "b": 100, "c": 100}
    free: dict[str, list[int]] = {model: [] for model in MODELS}
    for at, part in placed:
        free[MODELS[at]].append(part * mib[MODELS[at]] // 100)
    capacity = capacity_of(free, mib)
    found = demand_of(seen, MODELS).displaced(capacity)
    assert found.tolist() == pytest.approx(list(slow(seen, free, mib).values()))


@settings(max_examples=examples(200), deadline=None)
@given(st.dictionaries(needs, st.integers(1, 50), min_size=1, max_size=6), gpus)
def test_all_free_gpus_together_displace_as_many_as_they_are(
    seen: dict[GpuNeed, int], placed: list[tuple[int, int]]
) -> None:
    free = {model: [part for at, part in placed if MODELS[at] == model] for model in MODELS}
    assume(any(map(sum, free.values())))
    capacity = capacity_of(free, dict.fromkeys(MODELS, 100))
    displaced = demand_of(seen, MODELS).displaced(capacity)
    assert displaced @ capacity.free_gpus() == pytest.approx(capacity.free_gpus().sum())


def test_where_requests_run_anywhere_each_gpu_displaces_one() -> None:
    capacity = capacity_of({"a": [100, 50], "b": [100]}, {"a": 100, "b": 100})
    displaced = demand_of({GpuNeed(10, 0, ()): 5, GpuNeed(-1, 100, ()): 3}, "ab").displaced(capacity)
    assert displaced.tolist() == pytest.approx([1, 1])


def test_a_scarce_model_displaces_more_the_less_of_it_is_free() -> None:
    seen, models = {GpuNeed(-1, 100, ()): 10, GpuNeed(-1, 100, ("a",)): 5}, {"a": 0, "b": 1}
    found = [
        demand_of(seen, list(models)).displaced(
            capacity_of({"a": [100] * left, "b": [100] * 8}, dict.fromkeys(models, 100))
        )
        for left in (8, 4, 2, 1)
    ]
    scarce = [float(each[0]) for each in found]
    assert 1 < scarce[0] < scarce[1] < scarce[2] < scarce[3]
    assert all(each[1] < 1 for each in found)


def test_large_gpus_are_scarce_for_those_that_fit_on_no_other() -> None:
    capacity = capacity_of({"small": [100] * 4, "large": [200] * 4}, {"small": 100, "large": 200})
    small, large = demand_of({GpuNeed(100, 0, ()): 4, GpuNeed(200, 0, ()): 1}, ("small", "large")).displaced(capacity)
    per_request = small / 1, large / 2
    assert per_request[1] > per_request[0]


def test_only_so_many_requests_count_and_those_for_most_gpus_do() -> None:
    seen = {GpuNeed(mib, 0, ()): mib for mib in range(1, 1001)}
    demand = demand_of(seen, "a")
    assert demand.gpus.tolist() == list(range(1000, 488, -1))


def test_gpus_of_another_size_are_weighed_anew() -> None:
    seen = {GpuNeed(100, 0, ()): 4, GpuNeed(200, 0, ()): 1}
    demand = demand_of(seen, ("small", "large"))
    for mib in ({"small": 100, "large": 100}, {"small": 100, "large": 200}):
        capacity = capacity_of({"small": [100] * 4, "large": [mib["large"]] * 4}, mib)
        fresh = demand_of(seen, ("small", "large"))
        assert demand.displaced(capacity).tolist() == fresh.displaced(capacity).tolist()

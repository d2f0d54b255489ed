"""The policy of GPU time on a machine that has been up for years: its clock's steps are longer then."""

from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.examples import examples
from tests.unit.vgpu.gputime.gpu_model import (
    BE,
    LC,
    STANDARD,
    Program,
    SimulatedNode,
    always,
    container,
    looping,
    requests,
)
from vgpu.gputime.timing import Timing

YEARS_S = 3e8
"""A double has a step of 6e-8 s there."""
FRAME_S = Timing().frame_s

caps = st.lists(st.integers(5, 60), min_size=1, max_size=4).filter(lambda caps: sum(caps) <= 90)
uptimes = st.sampled_from([1e7, 5e7, YEARS_S])


@settings(max_examples=examples(15), deadline=None)
@given(caps, uptimes, st.integers(0, 9))
def test_caps_are_met_to_half_a_point_after_years(caps: list[int], uptime_s: float, seed: int) -> None:
    node = SimulatedNode(
        {f"t{at}": always(cap=cap, weight=cap) for at, cap in enumerate(caps)}, seed=seed, uptime_s=uptime_s
    )
    node.run(10.0)
    for at, cap in enumerate(caps):
        assert node.on_s(f"t{at}", 1.0) / 9 * 100 == pytest.approx(cap, abs=0.5), (caps, at)


def programs(kind: str, amount: int, wait_s: float) -> Program:
    match kind:
        case "always":
            return always(STANDARD, cap=amount, weight=amount)
        case "loop":
            return looping(amount, wait_s / 20)
        case "requests":
            return requests(LC, 2 * wait_s, wait_s / 4, 5.0)
        case "hints":
            at_s = [0.1 + 2 * wait_s * n for n in range(int(2 / wait_s))]
            return Program(
                container(LC), requests=[(at, wait_s / 4) for at in at_s], hints=[(at - 0.002, 0.002) for at in at_s]
            )
        case _:
            return always(BE)


mixes = st.lists(
    st.tuples(
        st.sampled_from(["always", "loop", "requests", "hints", "free"]), st.integers(5, 40), st.floats(0.005, 0.05)
    ),
    min_size=1,
    max_size=4,
)


@settings(max_examples=examples(25), deadline=None)
@given(mixes, uptimes)
@example([("always", 20, 0.01)], YEARS_S)
@example([("always", 20, 0.01), ("free", 5, 0.01), ("requests", 5, 0.01)], YEARS_S)
def test_a_node_that_has_been_up_for_years_shares_as_one_that_started_now(
    distribution: list[tuple[str, int, float]], uptime_s: float
) -> None:
    """Up to two frames of time: which of two equals goes first may be rounding, and where requests fall on the edge of a frame, so may be a switch."""
    young, old = (
        SimulatedNode({f"t{n}": programs(*of) for n, of in enumerate(distribution)}, uptime_s=up)
        for up in (0.0, uptime_s)
    )
    young.run(5.0)
    old.run(5.0)
    for name in young.programs:
        assert old.on_s(name) == pytest.approx(young.on_s(name), abs=2 * FRAME_S)
        assert old.scheduler.usage(name).suspends == pytest.approx(
            young.scheduler.usage(name).suspends, rel=0.25, abs=4
        )
    assert len(old.decisions) < 1.5 * len(young.decisions) + 10, "decided again for a rest that is only rounding"

"""Who runs on a GPU that has no room for all, and for how long, on a simulated node."""

from __future__ import annotations

import pytest

from tests.unit.vgpu.memory.swap.node_model import (
    BE,
    GIB,
    LC,
    SLOWER,
    SPEED,
    STANDARD,
    STEP_S,
    Program,
    SimulatedNode,
    contract,
    poisson,
)
from vgpu.memory.swap.actions import SwapIn, SwapOut
from vgpu.memory.swap.events import Progress
from vgpu.memory.swap.settings import SwapSettings
from vgpu.memory.swap.turns import Turns

CHANGE_16_GIB_S = 0.1 + 14 * GIB / SPEED
"""What two servers with 2 GiB guaranteed and 16 GiB used take to change places."""


def trainings(*weights: float, gib: float = 20, service_class: str = STANDARD) -> dict[str, Program]:
    return {
        f"t{number}": Program(contract(2, 24, service_class, weight), gib, always=True, wait_s=3600)
        for number, weight in enumerate(weights)
    }


def longest_wait_s(program: Program, until_s: float) -> float:
    ends = [0.0, *(end for _, end in program.spans)]
    begins = [*(begin for begin, _ in program.spans), until_s]
    return max(begin - end for begin, end in zip(begins, ends, strict=True))


def quantum_s(node: SimulatedNode, excess_gib: float) -> float:
    return (node.settings.overhead_s + excess_gib * GIB / SPEED) / node.settings.swap_part


@pytest.mark.parametrize("count", [2, 3, 5])
def test_equals_get_equal_time_and_each_waits_for_no_more_than_the_others_quanta(count: int) -> None:
    node = SimulatedNode(trainings(*[1.0] * count, gib=24 - 2 * (count - 1)))
    node.run(600)
    times = [one.ran_s for one in node.programs.values()]
    assert max(times) - min(times) <= 2 * SLOWER * quantum_s(node, 18)
    excess_gib = 22 - 2 * (count - 1)
    bound_s = (
        2 * (count - 1) * SLOWER * (quantum_s(node, excess_gib) + node.settings.overhead_s + excess_gib * GIB / SPEED)
    )
    assert max(longest_wait_s(one, 600) for one in node.programs.values()) <= bound_s


def test_time_follows_the_weights() -> None:
    node = SimulatedNode(trainings(1, 1, 3))
    node.run(1500)
    one, other, heavy = (program.ran_s for program in node.programs.values())
    assert heavy / one == pytest.approx(3, rel=0.1)
    assert heavy / other == pytest.approx(3, rel=0.1)


def test_swapping_costs_at_most_its_part_of_the_time() -> None:
    node = SimulatedNode(trainings(1, 1))
    node.run(600)
    lost_s = 600 - sum(program.ran_s for program in node.programs.values())
    assert 0 < lost_s <= 600 * node.settings.swap_part
    assert not any(program.refused for program in node.programs.values())


def test_a_container_with_work_keeps_its_place_for_a_quantum() -> None:
    node = SimulatedNode(trainings(1, 2, 1))
    node.run(600)
    for name in node.programs:
        for came_in_s in node.times_of(SwapIn, name):
            left_s = next((at for at in node.times_of(SwapOut, name) if at > came_in_s), 1e9)
            assert left_s - came_in_s >= quantum_s(node, 16) - STEP_S


def test_a_slower_gpu_gets_longer_quanta() -> None:
    node = SimulatedNode(trainings(1, 1), settings=SwapSettings(bytes_per_s=200e9))
    node.run(200)
    turns = [end - begin for begin, end in node.programs["t0"].spans]
    assert turns[-2] > turns[0] + 2


def test_a_latency_critical_request_gets_in_at_once() -> None:
    programs = trainings(1, service_class=BE)
    programs["lc"] = Program(contract(2, 24, LC), 16, requests=poisson(1, 0.05, 0.1, 600))
    node = SimulatedNode(programs)
    node.run(600)
    assert len(programs["lc"].latencies_s) > 20
    assert max(programs["lc"].latencies_s) <= 0.1 + 2 * CHANGE_16_GIB_S
    assert programs["t0"].ran_s > 300
    assert len(node.times_of(SwapIn, "lc")) > 5


def test_an_idle_neighbour_of_the_same_class_gives_way_within_a_change_of_places() -> None:
    programs = {
        "one": Program(contract(2, 24), 16, requests=[(10.0, 0.1), (30.0, 0.1)]),
        "other": Program(contract(2, 24), 16, requests=[(20.0, 0.1), (40.0, 0.1)]),
    }
    node = SimulatedNode(programs)
    node.run(45)
    assert max(programs["one"].latencies_s[1:] + programs["other"].latencies_s[1:]) <= 0.1 + CHANGE_16_GIB_S + STEP_S


def test_a_pause_shorter_than_a_change_of_places_loses_nothing() -> None:
    steps = [(2.0 + number * 0.5, 0.3) for number in range(100)]
    programs = {"steps": Program(contract(2, 24), 20, requests=steps)}
    programs["other"] = Program(contract(2, 24), 20, requests=[(60.0, 1.0)])
    node = SimulatedNode(programs)
    node.run(6)
    before = len(node.times_of(SwapOut, "steps"))
    node.work("other")
    node.run(6 + quantum_s(node, 16))
    assert len(node.times_of(SwapOut, "steps")) <= before + 1


def test_a_less_urgent_container_waits_for_a_quantum_of_idleness() -> None:
    programs = {"lc": Program(contract(2, 24, LC), 20, requests=[(10.0, 0.1)])}
    programs["be"] = Program(contract(2, 24, BE), 20, always=True)
    node = SimulatedNode(programs)
    node.run(100)
    idle_s, ran_s = 10.1, next(begin for begin, _ in programs["be"].spans if begin > 10.1)
    assert quantum_s(node, 18) - 1 <= ran_s - idle_s <= quantum_s(node, 18) + 1


def test_a_starving_container_gets_one_quantum_before_a_more_urgent_one() -> None:
    programs = trainings(1, service_class=LC)
    programs["be"] = Program(contract(2, 24, BE), 20, always=True, wait_s=3600)
    settings = SwapSettings(starve_after_s=60)
    node = SimulatedNode(programs, settings=settings)
    node.run(0.5)
    node.idle("t0")
    node.run(30)
    assert programs["be"].ran_s > 5
    node.work("t0")
    node.run(400)
    bound_s = settings.starve_after_s + quantum_s(node, 18) + 1
    assert longest_wait_s(programs["be"], 400) <= bound_s
    assert all(end - begin <= quantum_s(node, 18) + 1 for begin, end in programs["be"].spans[1:])
    assert programs["t0"].ran_s > 250


def test_a_container_that_waits_first_gets_the_next_quantum_although_smaller_ones_come_meanwhile() -> None:
    programs = {"big": Program(contract(0.25, 24), 22, always=True, wait_s=3600)}
    programs.update({f"s{number}": Program(contract(0.25, 24), 7, always=True, wait_s=3600) for number in range(6)})
    node = SimulatedNode(programs)
    node.run(600)
    for program in programs.values():
        assert longest_wait_s(program, 600) <= 7 * (quantum_s(node, 21) + 1)


def test_free_memory_is_lent_until_the_first_in_the_order_can_use_it() -> None:
    programs = {
        "small": Program(contract(0.25, 24, level=2), 4),
        "big": Program(contract(0.25, 24, level=1), 20, always=True),
    }
    node = SimulatedNode(programs)
    node.run(1)
    for name in ("stays", "leaves"):
        programs[name] = Program(contract(0.25, 24, level=1), 10, always=True)
        node.join(name)
    node.run(3)
    node.work("small")
    node.run(5)
    assert not node.may_run("big")
    assert not node.may_run("small")
    node.leave("leaves")
    node.run(6)
    assert node.may_run("small")
    node.run(10)
    (came_in_s, *_), (left_s, *_) = node.times_of(SwapIn, "big"), node.times_of(SwapOut, "stays")
    assert came_in_s == left_s == pytest.approx(1 + SLOWER * quantum_s(node, 9.75), abs=0.5)
    assert came_in_s in node.times_of(SwapOut, "small")


def test_a_request_that_can_never_fit_keeps_nobody_from_its_turn() -> None:
    programs = {"keeps": Program(contract(10, 10), 10)}
    programs["hopes"] = Program(contract(0.25, 24, level=1), 16, always=True, wait_s=3600)
    programs.update({name: Program(contract(0.25, 24), 12, always=True, wait_s=3600) for name in ("one", "other")})
    node = SimulatedNode(programs)
    node.run(60)
    assert programs["one"].ran_s > 20
    assert programs["other"].ran_s > 20


def test_a_container_with_two_gpus_moves_as_a_whole() -> None:
    programs = {
        "pair": Program(contract(2, 24, gpus="01"), 20, always=True),
        "left": Program(contract(2, 24, gpus="0"), 20, always=True),
        "right": Program(contract(2, 24, gpus="1"), 20, always=True),
    }
    node = SimulatedNode(programs, gpus="01")
    node.run(600)
    assert programs["pair"].ran_s > 150
    assert programs["left"].ran_s > 150
    assert programs["right"].ran_s > 150
    assert len(node.times_of(SwapIn, "pair")) > 5


def test_two_that_are_half_back_do_not_wait_for_each_other() -> None:
    programs = {name: Program(contract(0, 24), 11, always=True) for name in ("one", "other")}
    node = SimulatedNode(programs)
    node.run(1)
    programs["guaranteed"] = Program(contract(22, 22), 22)
    node.join("guaranteed")
    node.run(5)
    assert node.policy.paused() == {"one", "other"}
    node.copying = False
    node.free("guaranteed", "0", 22 * GIB)
    node.step()
    for name in ("one", "other"):
        assert node.times_of(SwapIn, name)
        half = programs[name].memory["0"].away // 2
        programs[name].memory["0"].away -= half
        node.report(Progress(node.now_s, name, "0", "in", half))
    node.request("guaranteed", "0", 12 * GIB)
    node.copying = True
    node.run_for(2)
    assert len(node.policy.paused()) == 1
    node.run_for(60)
    assert min(one.spans[-1][1] for one in (programs["one"], programs["other"])) > 50


def test_announced_work_finds_its_memory() -> None:
    programs = {"one": Program(contract(2, 24), 16, requests=[(20.0, 0.1)])}
    programs["other"] = Program(contract(2, 24), 16, requests=[(10.0, 0.1)])
    node = SimulatedNode(programs)
    node.run(15)
    assert not node.may_run("one")
    node.announce("one", 5.0)
    node.run(21)
    assert programs["one"].latencies_s == pytest.approx([0.1], abs=2 * STEP_S)


def test_an_announcement_without_work_ends() -> None:
    programs = {"one": Program(contract(2, 24), 16), "other": Program(contract(2, 24), 16, always=True)}
    node = SimulatedNode(programs)
    node.run(15)
    node.announce("one", 0.0)
    node.run(60)
    assert node.may_run("other")
    assert programs["other"].ran_s > 35


def test_three_servers_of_16_gib_answer_on_24_gib() -> None:
    programs = {
        f"m{number}": Program(contract(2, 24, LC), 16, requests=poisson(number, 0.2, 0.1, 300)) for number in range(3)
    }
    node = SimulatedNode(programs)
    node.run(330)
    for program in programs.values():
        assert not program.refused
        assert not program.arrived
        assert len(program.latencies_s) > 30
        assert sorted(program.latencies_s)[len(program.latencies_s) // 2] <= 0.1 + CHANGE_16_GIB_S + STEP_S


def test_the_quantum_is_a_change_of_places_by_its_part() -> None:
    node = SimulatedNode({"one": Program(contract(2, 24), 12)})
    node.run(1)
    state = node.policy._states["one"]
    turns = Turns(node.settings, node.policy._rooms)
    assert turns.change_s(state) == pytest.approx(0.1 + 10 * GIB / SPEED)
    assert turns.quantum_s(state) == pytest.approx(20 * turns.change_s(state))

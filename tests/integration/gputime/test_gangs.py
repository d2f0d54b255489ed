"""Containers with several GPUs, whose kernels spin until those on their other GPUs run: no neighbour leads to a deadlock."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.integration.gputime.conftest import GPUS, Node, Program, until

PROGRAM = Path(__file__).with_name("gang_program.py")
BUSY_US = 5_000
STEP_US = 2_000
CELLS_BYTES = 4 << 20
"""For the steps of a gang: four bytes for each and each GPU."""
LIMIT_S = 90.0
"""A busy machine runs up to ten programs here."""


@pytest.fixture
def node_of(library: Path) -> Iterator[Callable[[int], Node]]:
    made: list[Node] = []

    def make(gpus: int) -> Node:
        made.append(Node(library, gpus=gpus))
        return made[-1]

    yield make
    for node in made:
        assert not node.misuses()
        node.close()


def gang(node: Node, name: str, gpus: int, first: int = 0, processes: int = 1) -> list[Program]:
    """A container with so many GPUs from the first on, shared out to its processes."""
    cells = node.folder / f"{name}.cells"
    with cells.open("wb") as file:
        file.truncate(CELLS_BYTES)
    grant = node.grant(name, gpus=gpus, first=first)
    env = {
        "GANG_SIZE": str(gpus),
        "GANG_CELLS": str(cells),
        "CUDA_VISIBLE_DEVICES": ",".join(GPUS[first : first + gpus]),
    }
    return [
        node.run_in(
            grant,
            command=(sys.executable, str(PROGRAM)),
            GANG_GPUS=",".join(map(str, range(gpus)[rank::processes])),
            **env,
        )
        for rank in range(processes)
    ]


def busy(node: Node, gpu: int, service_class: str = "best-effort") -> Program:
    """A container that always has work on a GPU."""
    grant = node.grant(f"{service_class}-{gpu}", service_class, first=gpu)
    program = node.run_in(grant, CUDA_VISIBLE_DEVICES=GPUS[gpu])
    program.do(f"work_on({BUSY_US})")
    return program


@pytest.mark.parametrize("gpus", [2, 4])
@pytest.mark.parametrize("processes", [1, 2])
def test_a_gang_beside_best_effort_and_latency_critical_neighbours_advances_and_so_do_they(
    node_of: Callable[[int], Node], gpus: int, processes: int
) -> None:
    node = node_of(gpus)
    background = [busy(node, gpu) for gpu in range(gpus)]
    urgent = node.run_in(node.grant("lc", "latency-critical"), CUDA_VISIBLE_DEVICES=GPUS[0])
    ranks = gang(node, "gang", gpus, processes=processes)
    urgent.start("requests(30, 1000, 0.02)")
    for rank in ranks:
        rank.start(f"steps(60, {STEP_US})")
    assert [rank.finish() for rank in ranks] == [60] * processes
    assert len(urgent.finish()) == 30
    assert node.gpu_time("gang").suspends > 0
    before = [node.ran_us(program) for program in background]
    until(lambda: all(node.ran_us(one) > ran for one, ran in zip(background, before, strict=True)), LIMIT_S)


def test_gangs_that_overlap_in_part_all_advance(node_of: Callable[[int], Node]) -> None:
    """GPUs 0 and 1, 1 and 2, 2 and 3: any two neighbours exclude each other. On 0 and 3 a container always has work."""
    node = node_of(4)
    for gpu in (0, 3):
        busy(node, gpu, "standard")
    ranks = [gang(node, f"gang-{first}", 2, first)[0] for first in range(3)]
    for rank in ranks:
        rank.start(f"steps(40, {STEP_US})")
    assert [rank.finish() for rank in ranks] == [40, 40, 40]


def test_a_gang_of_which_a_process_is_killed_spins_in_its_own_time_only(node_of: Callable[[int], Node]) -> None:
    node = node_of(2)
    ranks = gang(node, "gang", 2, processes=2)
    beside = [busy(node, gpu, "standard") for gpu in (0, 1)]
    for rank in ranks:
        rank.start(f"steps(100000, {STEP_US})")
    until(lambda: node.gpu_time("gang").suspends > 3, LIMIT_S)
    ranks[1].send(signal.SIGKILL)
    ranks[1].process.wait()
    until(lambda: node.gpu_time("gang").processes == 1, LIMIT_S)
    before = [node.ran_us(program) for program in beside]
    spun = node.ran_us(ranks[0])
    until(lambda: all(node.ran_us(one) > ran + 200_000 for one, ran in zip(beside, before, strict=True)), LIMIT_S)
    until(lambda: node.ran_us(ranks[0]) > spun, LIMIT_S)
    ranks[0].send(signal.SIGKILL)


def test_a_gang_goes_on_after_its_arbiter_was_killed_between_switches(node_of: Callable[[int], Node]) -> None:
    node = node_of(2)
    for gpu in (0, 1):
        busy(node, gpu, "standard")
    (rank,) = gang(node, "gang", 2)
    for kills in range(1, 4):
        rank.start(f"steps(80, {STEP_US})")
        until(lambda: (of := node.gpu_time("gang")) is not None and of.suspends > 0, LIMIT_S)
        node.arbiter.kill()
        node.arbiter.wait()
        (node.folder / "status.sock").unlink()
        node.start_arbiter()
        assert rank.finish() == 80 * kills

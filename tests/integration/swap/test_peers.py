"""Programs on two GPUs whose kernels use each other's memory, while that is swapped: every cell is right, and access is as the program set it."""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.swap.conftest import GPUS, BurstNode, BurstProgram, until

ROUNDS = int(os.environ.get("TANGRAM_SWAP_ROUNDS", "3"))
SEED = int(os.environ.get("TANGRAM_SWAP_SEED", "1"))
QUICK = Path(__file__).with_name("quick_arbiter.py")
PROGRAM = Path(__file__).with_name("peer_program.py")


@pytest.fixture
def pair() -> Iterator[BurstNode]:
    """Two GPUs of 256 MiB with a copier each, and quick turns."""
    made = BurstNode(256, 512, [str(QUICK)], gpus=2)
    yield made
    try:
        print(made.report())
    finally:
        made.close()


def start(node: BurstNode, name: str) -> BurstProgram:
    return node.run(name, 32, 200, wait_s=600, path=PROGRAM)


def swapped_gpus(node: BurstNode) -> set[str]:
    """The GPUs whose memory was ever ordered to leave."""
    orders = [line for line in node.log().splitlines() if '"swap out"' in line]
    return {gpu for gpu in GPUS if any(gpu in line for line in orders)}


def test_memory_of_a_process_that_sees_two_gpus_is_elastic_on_both(pair: BurstNode) -> None:
    one = start(pair, "one")
    for device in (0, 1):
        assert one.do(f"take({device}, 'alloc', 150)") == 0
        assert one.do("is_elastic(pieces[-1].at)")
    assert one.do("all_wrong()") == 0


def all_is_well(node: BurstNode, *programs: BurstProgram) -> None:
    for program in programs:
        assert program.do("all_wrong()") == 0, program.name
        program.do("[give(piece) for piece in list(pieces)] and None")
    until(lambda: not node.records())
    until(lambda: not node.descriptors())
    assert node.misuses() == ""


def crosses(program: BurstProgram) -> None:
    """Kernels of each GPU on the memory of the other, without a wait between them."""
    program.do("[add(other(piece.device), piece) for piece in pieces for _ in range(3)] and None")


def one_away(node: BurstNode) -> tuple[BurstProgram, BurstProgram]:
    """Two programs with memory on both GPUs: that of the first is away."""
    first, second = start(node, "first"), start(node, "second")
    for program in (first, second):
        for device in (0, 1):
            assert program.do(f"take({device}, 'alloc', 140)") == 0
    assert node.away_mib("first") > 0
    return first, second


def test_kernels_of_each_gpu_use_the_others_memory_before_and_after_it_was_away(pair: BurstNode) -> None:
    first, second = start(pair, "first"), start(pair, "second")
    for program in (first, second):
        assert program.do("[enable(0), enable(1)]") == [0, 0]
        for device in (0, 1):
            assert program.do(f"take({device}, 'alloc', 140)") == 0
    for _ in range(ROUNDS):
        for program in (first, second):
            crosses(program)
            assert program.do("all_wrong()") == 0
    assert swapped_gpus(pair) == set(GPUS)
    all_is_well(pair, first, second)


def test_access_that_is_enabled_and_disabled_while_memory_is_away_is_so_when_it_is_back(pair: BurstNode) -> None:
    first, second = one_away(pair)
    assert first.do("[enable(0), enable(0), enable(1)]") == [0, 704, 0]
    owner = "owner.on_gpu(1) or owner.disable(0)"
    assert first.do(f"[{owner}, {owner}] and enabled.discard((1, 0))") is None
    assert pair.away_mib("first") > 0, "no call waited for it"
    assert first.do("all_wrong()") == 0, "that brings it back"
    for number in (0, 1):
        assert first.do(f"[trust(device, pieces[{number}]) for device in DEVICES] and None") is None
    first.do("enable(1)")
    crosses(first)
    all_is_well(pair, first, second)


def test_a_context_that_ends_takes_its_access_along(pair: BurstNode) -> None:
    one = start(pair, "one")
    assert one.do("take(1, 'alloc', 60)") == 0
    assert one.do("owner.on_gpu(0, 'second') or owner.enable(1)") == 0
    assert one.do("owner.access_of(pieces[0].at, 0)") == 3
    assert one.do("owner.on_gpu(0) or owner.enable(1)") == 0
    assert one.do("owner.disable(1)") == 0
    assert one.do("owner.access_of(pieces[0].at, 0)") == 3, "another context of that GPU has access"
    one.do("owner.end_context(0, 'second')")
    assert one.do("owner.access_of(pieces[0].at, 0)") == 0
    all_is_well(pair, one)


def test_pools_and_memory_of_the_programs_own_keep_their_access_over_a_swap(pair: BurstNode) -> None:
    first, second = start(pair, "first"), start(pair, "second")
    for kind in ("pool", "created"):
        assert first.do(f"take(0, '{kind}', 60)") == 0
    first.do("[open_pool(0, opened=True), open_created(pieces[1], opened=True)] and None")
    assert first.do("take(0, 'pool', 20)") == 0, "a region that is made later"
    for device in (0, 1):
        assert second.do(f"take({device}, 'alloc', 150)") == 0
    assert pair.away_mib("first") > 0
    crosses(first)
    assert first.do("all_wrong()") == 0
    first.do("[open_pool(0, opened=False), open_created(pieces[1], opened=False)] and None")
    assert second.do("all_wrong()") == 0
    assert first.do("[all_wrong()] + [owner.access_of(piece.at, 1) for piece in pieces]") == [0, 0, 0, 0]
    all_is_well(pair, first, second)


def test_access_to_memory_of_the_programs_own_waits_until_it_is_back(pair: BurstNode) -> None:
    first, second = start(pair, "first"), start(pair, "second")
    assert first.do("take(0, 'created', 140)") == 0
    assert second.do("take(0, 'alloc', 150)") == 0
    assert pair.away_mib("first") > 0
    first.do("open_created(pieces[0], opened=True)")
    assert pair.away_mib("first") == 0, "only the driver can judge it"
    assert first.do("all_wrong()") == 0
    all_is_well(pair, first, second)


@pytest.mark.parametrize("how", ["copy_now({}, {}, 2 * MIB)", "copy({}, {}, 2 * MIB, 0) or owner.done()"])
def test_copies_between_the_gpus_need_no_access(pair: BurstNode, how: str) -> None:
    first, second = one_away(pair)
    for number, (device, to) in enumerate((d, t) for d in (0, 1) for t in (0, 1)):
        copy = how.format(f"pieces[{to}].at", f"pieces[{1 - to}].at")
        assert first.do(f"write({1 - to}, pieces[{1 - to}], {number})") == 0
        assert second.do("all_wrong()") == 0, "the first is away again"
        assert first.do(f"owner.on_gpu({device}) or owner.{copy}") == 0
        assert first.do(f"wrong({to}, pieces[{to}]) > 0 and owner.wrong(pieces[{to}].at, 2 * MIB, {number})") == 0


@pytest.mark.parametrize("call", ["cuMemcpyHtoD_v2", "cuMemcpy"])
def test_what_is_copied_from_the_host_goes_to_a_gpu_that_is_not_current(pair: BurstNode, call: str) -> None:
    one = start(pair, "one")
    assert one.do("take(1, 'alloc', 60)") == 0
    assert (
        one.do(f"owner.on_gpu(0) or owner.cuda.{call}(owner.u64(pieces[0].at), owner.u64(told), owner.u64(4096))") == 0
    )
    assert one.do("owner.cells(pieces[0].at, 100) == owner.cells(told, 100)")
    assert one.do("owner.cuda.cuMemcpyDtoH_v2(owner.u64(told), owner.u64(pieces[0].at + 4096), owner.u64(4096))") == 0
    assert one.do("owner.cells(pieces[0].at + 4096, 100) == owner.cells(told, 100)")


def test_two_programs_that_do_anything_take_turns(pair: BurstNode) -> None:
    programs = [start(pair, "first"), start(pair, "second")]
    for round_ in range(ROUNDS):
        for number, program in enumerate(programs):
            program.send(f"work(120, {SEED * 1000 + round_ * 10 + number}, 130)")
        for program in programs:
            assert program.answer("of random steps") == 0
    assert swapped_gpus(pair) == set(GPUS)
    all_is_well(pair, *programs)


def test_whoever_is_killed_no_cell_is_wrong(pair: BurstNode) -> None:
    dice = random.Random(SEED)
    programs = [start(pair, "first"), start(pair, "second")]
    for serial in range(2 * ROUNDS):
        what = dice.choice(("arbiter", "copier", "other copier", "program"))
        for number, program in enumerate(programs):
            program.send(f"work(80, {SEED * 1000 + serial * 10 + number}, 130)")
        threading.Event().wait(dice.random() * 2)  # a moment of any stage: no event says which
        if what == "arbiter":
            pair.kill(pair.arbiter)
            pair.start_arbiter()
        elif what == "copier":
            pair.kill(pair.copier)
            pair.start_copier()
        elif what == "other copier":
            pair.kill_other()
        else:
            programs[1].end()
            pair.programs.remove(programs[1])
            programs[1] = start(pair, f"second-{serial}")
        for program in programs if what != "program" else programs[:1]:
            assert program.answer(f"{what} was killed in round {serial}") == 0, (serial, what)
    all_is_well(pair, *programs)

"""Programs that make and map their memory themselves, as PyTorch's expandable segments do, above their guarantees."""

from __future__ import annotations

from tests.integration.swap.conftest import BurstNode, BurstProgram, until

INVALID_VALUE, OUT_OF_MEMORY = 1, 2
SEGMENT = "[2] * 30 + [20] * 27"
"""600 MiB in the sizes of PyTorch; the GPU has 1024."""


def able(node: BurstNode, name: str, limit_mib: int = 900) -> BurstProgram:
    """A program that may burst by now: until its arbiter has the copier and its channels, it has its guarantee."""
    program = node.run(name, limit_mib=limit_mib)
    until(lambda: program.do("expand([120], 0)") == 0)
    assert program.do("shrink(120)") == 0
    return program


def take_turns(node: BurstNode, rounds: int, *programs: BurstProgram) -> None:
    for _ in range(rounds):
        for program in programs:
            assert program.do("add() or wait()") is None
            assert program.do("wrong()") == 0


def test_two_segments_above_their_guarantees_take_turns_and_every_cell_is_right(node: BurstNode) -> None:
    first, second = able(node, "first"), able(node, "second")
    assert first.do(f"expand({SEGMENT}, 1)") == 0
    assert second.do(f"expand({SEGMENT}, 2)") == 0, "the first is idle: it gives way"
    take_turns(node, 2, first, second)
    assert node.swaps_out() >= 3
    assert first.do("shrink(300)") == 300 << 20
    assert second.do("shrink(300)") == 300 << 20
    take_turns(node, 1, first, second)
    swaps = node.swaps_out()
    take_turns(node, 2, first, second)
    assert node.swaps_out() == swaps, "both fit now"
    assert node.misuses() == ""


def test_what_is_exported_stays_on_the_gpu_within_the_guarantee_and_is_refused_above_it(node: BurstNode) -> None:
    """Of a guarantee of 100 MiB, the context, its room and what the library reserves for code that it loads take up to 31 MiB."""
    first, second = able(node, "first"), able(node, "second")
    assert first.do("expand([50, 300], 1)") == 0
    assert first.do("export(0)") == 0
    assert first.do("export(1)") == OUT_OF_MEMORY
    assert second.do("fill(800, 2)") == 0, "the first is idle: what is not exported gives way"
    assert first.do("first_cell(0)") == 1, "it is on the GPU"
    assert first.do("wrong()") == 0
    assert second.do("wrong()") == 0
    assert node.misuses() == ""


def test_a_segment_goes_up_to_the_limit_and_no_further(node: BurstNode) -> None:
    first = able(node, "first", limit_mib=300)
    assert first.do("expand([20] * 20, 1)") == OUT_OF_MEMORY
    full = first.do("shrink(0)") >> 20
    assert 120 < full <= 300
    assert first.do("shrink(40)") >> 20 == full - 40
    assert first.do("expand([40], 3)") == 0
    assert first.do("wrong()") == 0

"""Programs whose memory is stream-ordered, as that of PyTorch's cudaMallocAsync is, above their guarantees."""

from __future__ import annotations

import pytest

from tests.integration.swap.conftest import BurstNode, BurstProgram, until


def able(node: BurstNode, name: str, *, keeps: bool) -> BurstProgram:
    """A program that may burst by now."""
    program = node.run(name, limit_mib=900, wait_s=600)
    program.do(f"use_streams(3, keeps={keeps})")
    until(lambda: program.do("take_piece(120 * MIB, 0, 1)") == 0)
    assert program.do("elastic(pieces[0][0])")
    return program


@pytest.mark.parametrize("keeps", [False, True])
def test_two_programs_with_stream_ordered_memory_take_turns_and_every_cell_is_right(
    node: BurstNode, keeps: bool
) -> None:
    first, second = able(node, "first", keeps=keeps), able(node, "second", keeps=keeps)
    for program in (first, second):
        assert program.do("[take_piece(100 * MIB, one % 3, one) for one in range(5)]") == [0] * 5
    for round_ in range(4):
        for program in (first, second):
            assert program.do(f"work_in_streams(40, {round_ + 1}, 700)") == [0, 0]
            if not program.do("pieces"):
                assert program.do("[take_piece(100 * MIB, one % 3, one) for one in range(6)]") == [0] * 6
    assert node.swaps_out() >= 3
    assert node.misuses() == ""


def test_what_a_program_frees_in_order_goes_to_another(node: BurstNode) -> None:
    first, second = able(node, "first", keeps=False), able(node, "second", keeps=False)
    assert first.do("[take_piece(100 * MIB, one % 3, one) for one in range(5)]") == [0] * 5
    assert first.do("[give_piece(0, 1) for _ in range(len(pieces))]")
    assert first.do("wait()") is None
    assert second.do("[take_piece(100 * MIB, one % 3, one) for one in range(6)]") == [0] * 6
    assert node.away_mib("first") == 0, "nothing had to move"
    assert first.do("work_in_streams(0, 1, 0)") == [0, 0]

"""Memory of cuMemCreate in a container that may burst: blocks of the program's own, which can be swapped. The container: burst_kit.py."""

from __future__ import annotations

from tests.integration.shim.burst_kit import SAME, burst, bursting_node, elastic, plain
from tests.integration.shim.burst_kit import bursting_stage as stage
from tests.integration.shim.conftest import GPUS, INVALID_VALUE, MIB, Stage

__all__ = ["bursting_node", "stage"]

NOT_INITIALIZED = 3


def is_ours(handle: int) -> bool:
    """A handle of the library's own."""
    return handle >> 48 == 0x5447


def test_blocks_of_cumemcreate_can_be_swapped_where_the_container_may_burst(stage: Stage) -> None:
    gpu, other = elastic(stage), plain(stage)
    assert is_ours(gpu.must("create(4)"))
    assert is_ours(gpu.must("create(4, 0, 1)")), "exportable by a descriptor, as PyTorch requests it"
    assert not is_ours(other.must("create(4)"))
    assert (stage.true_mib(gpu), gpu.free_mib()) == (8, 992)


def test_memory_of_cumemcreate_is_the_programs_as_the_driver_has_it(stage: Stage) -> None:
    gpu, other = elastic(stage), plain(stage)
    answers = []
    for one in (gpu, other):
        at, half = one.must("reserve(8)"), 4 * MIB
        block, second = one.must("create(4)"), one.must("create(4, 0, 1)")
        answer = [
            one.request(f"map_at({at}, {block}, 4, {2 * MIB})"),
            one.request(f"map_at({at}, {block}, 6)"),
            one.request(f"map_at({at}, {block}, 4)"),
            one.request(f"map_at({at}, {second}, 4)"),
            one.request(f"map_at({at + half}, {second}, 4)"),
            one.request(f"access_of({at})"),
            one.request(f"give_access({at}, 6)"),
            one.request(f"give_access({at}, 8)"),
            one.request(f"give_access({at}, 4, 0, 1)"),
            one.request(f"access_of({at})"),
            one.request(f"access_of({at + half})"),
            one.request(f"fill({at + half}, 4, 9)"),
            one.request(f"bytes_at({at + half}, 64)"),
            one.request(f"properties({block})"),
            one.request(f"properties({second})"),
            one.request(f"export_as({block}, 1)"),
            one.request(f"export_as({block}, 8)"),
            one.request(f"export_as({second}, 8)"),
            *(one.request(f"attribute({at + half + 5}, '{name}')") for name in SAME),
            *(one.request(f"attribute({at + 5}, '{name}')") for name in SAME),
            [place - at for place in one.request(f"range_of({at + half + 5})")[1:2]],
            [one.must(f"retain({at})") == block, one.request(f"retain({at + 8 * MIB})")[0]],
            one.request(f"release({block})"),
            one.request(f"release({block})"),
            one.request(f"release({block})"),
            one.request(f"properties({block})"),
            one.request(f"fill({at + half}, 4, 8)"),
            one.request(f"unmap({at}, 2)"),
            one.request(f"unmap({at}, 8)"),
            one.request(f"unmap({at}, 8)"),
            one.request(f"properties({second})"),
            one.request(f"map_at({at + half}, {second}, 4)"),
            one.request(f"give_access({at + half}, 4)"),
            one.request(f"bytes_at({at + half}, 64)"),
            one.request(f"unmap({at + half}, 4)"),
            one.request(f"release({second})"),
            one.request(f"unreserve({at}, 8)"),
        ]
        answers.append(answer)
    for ours, natives in zip(*answers, strict=True):
        assert ours[0] == natives[0]
        assert ours[0] != 0 or ours == natives
    assert (stage.true_mib(gpu), gpu.free_mib()) == (0, 1000)


def test_eight_thousand_blocks_are_a_segment(stage: Stage) -> None:
    stage.grant((GPUS[0], 16000))
    gpu = elastic(stage)
    at = gpu.must("expand(8000, 2)")
    assert is_ours(gpu.must(f"retain({at + 9000 * MIB})"))
    gpu.must(f"release({gpu.must(f'retain({at + 9000 * MIB})')})")
    gpu.must(f"give_access({at}, 16000)")
    assert stage.true_mib(gpu) == 16000
    gpu.must(f"fill({at + 15998 * MIB}, 2, 7)")
    gpu.must(f"unmap({at}, 8000)")
    assert (stage.true_mib(gpu), gpu.free_mib()) == (8000, 8000)
    gpu.must(f"unmap({at + 8000 * MIB}, 8000)")
    assert (stage.true_mib(gpu), gpu.free_mib()) == (2, 15998), "a handle has one of them still"


def test_a_block_that_is_exported_is_charged_where_it_is_imported(stage: Stage) -> None:
    gpu, importer = elastic(stage), elastic(stage)
    block = gpu.must("create(4, 0, 1)")
    at = gpu.must(f"map_block({block}, 4)")
    gpu.must(f"fill({at}, 4, 5)")
    _, pid, fd = gpu.request(f"export_block({block})")
    theirs = importer.must(f"import_block({pid}, {fd})")
    assert not is_ours(theirs), "what another process has is not swapped"
    there = importer.must(f"map_block({theirs}, 4)")
    assert set(bytes.fromhex(importer.must(f"bytes_at({there}, 4096)"))) == {5}


def test_the_librarys_own_handles_reach_no_function_of_the_driver(stage: Stage) -> None:
    gpu = elastic(stage)
    block = gpu.must("create(4)")
    array = gpu.must("array(1024, 1024, flags=0x40)")
    assert gpu.request(f"tile({array}, {block})")[0] == 0
    gpu.must(f"release({block})")
    assert gpu.free_mib() == 996, "the array has it"
    gpu.must(f"array_end({array})")
    assert gpu.free_mib() == 1000


def test_memory_of_cumemalloc_is_none_that_the_program_mapped(stage: Stage) -> None:
    """No call takes it apart: neither within a request, nor across its ends, nor what is free beside it."""
    gpu, other = elastic(stage), plain(stage)
    for one in (gpu, other):
        at, small, block = one.must("alloc(8)"), one.must("alloc_bytes(4096)"), one.must("create(2)")
        there = one.must("reserve(2)")
        for place in (at, at + 2 * MIB, at - 2 * MIB + (at % (2 * MIB)), small // (2 * MIB) * (2 * MIB)):
            calls = (
                f"map_at({place}, {block}, 4)",
                f"give_access({place}, 4)",
                f"unmap({place}, 4)",
                f"unreserve({place}, 4)",
            )
            assert [one.request(call)[0] for call in calls] == [INVALID_VALUE] * 4
        assert one.request(f"unmap({at}, 8)")[0] == one.request(f"unreserve({at}, 8)")[0] == INVALID_VALUE
        one.must(f"fill({at}, 8, 7)")
        assert one.must(f"bytes_at({at + 7 * MIB}, 1)") == "07"
        one.must(f"unreserve({there}, 2)")


def test_a_forked_child_has_the_drivers_answer_for_every_handle(stage: Stage) -> None:
    gpu, other = elastic(stage), plain(stage)
    answers = []
    for one in (gpu, other):
        block, at = one.must("create(2, 0, 1)"), one.must("reserve(2)")
        calls = (f"export_as({block}, 1)", f"release({block})", f"map_at({at}, {block}, 2)", f"properties({block})")
        answers.append([one.request(f"in_child(lambda: {call})") for call in calls])
    assert [answer[0] for answer in answers[1]] == [NOT_INITIALIZED] * 4
    assert answers[0] == answers[1]


def test_blocks_that_cannot_be_swapped_are_the_drivers(stage: Stage) -> None:
    gpu = elastic(stage)
    for handles in (8, 9):
        rc, handle = gpu.request(f"create(4, 0, {handles})")
        assert rc != 0 or not is_ours(handle)
    burst(stage)
    several = stage.worker()
    assert not is_ours(several.must("create(4)"))
    assert "cannot be swapped: the process sees a GPU that its container's grant does not name" in several.end()

"""Blocks of memory that cross processes: content as long as one of them has it, and none of it afterwards."""

from __future__ import annotations

from pathlib import Path

import pytest

MIB = 1 << 20
INVALID_VALUE, NOT_SUPPORTED = 1, 801
CONTEXT, SYNC_MEMOPS, LEGACY_IPC = 1, 6, 10


@pytest.fixture
def driver(fake_driver):
    return fake_driver("gpu h200 memory_mib=20000 context_mib=0")


def content_mib(driver) -> int:
    """Host memory that the content of all GPU memory takes."""
    folder = Path(f"/proc/{driver.process.pid}/fd")
    (memory,) = (fd for fd in folder.iterdir() if "nvidia-fake-driver" in str(fd.readlink()))
    return memory.stat().st_blocks * 512 // MIB


def lend(one, other, mib: int = 2) -> tuple[int, int]:
    """A block that both have mapped, and nobody has a handle of: where each has it."""
    one.do(f"kept.append(create({mib}))")
    at = one.do(f"map_block(reserve({mib}), kept[-1], {mib})")
    fd = one.do("export(kept[-1])")
    there = other.do(f"take({one.process.pid}, {fd}, {mib})")
    one.do(f"ok(cuda.cuMemRelease(u64(kept.pop()))) or close({fd})")
    return at, there


@pytest.mark.parametrize("mib", [2, 20, 130])
def test_both_see_what_kernels_of_either_write(driver, owner, mib):
    one, other = owner(driver), owner(driver)
    at, there = lend(one, other, mib)
    one.do(f"ok(launch('write', {at}, {mib} * MIB, 1, 0)) or ok(done())")
    assert other.do(f"wrong({there}, {mib} * MIB, 1)") == 0
    other.do(f"ok(launch('add', {there}, {mib} * MIB, 2, 0)) or ok(done())")
    assert one.do(f"wrong({at}, {mib} * MIB, 3)") == 0


@pytest.mark.parametrize("how", ["unmap", "kill"])
def test_the_content_stays_with_the_importer_and_then_goes(driver, owner, how):
    one, other = owner(driver), owner(driver)
    at, there = lend(one, other, 20)
    before = content_mib(driver)
    one.do(f"ok(launch('write', {at}, 20 * MIB, 1, 0)) or ok(done())")
    own = one.do("alloc(30 * MIB)")
    one.do(f"ok(launch('write', {own}, 30 * MIB, 1, 0)) or ok(done())")
    if how == "unmap":
        one.do(f"ok(unmap({at}, 20)) or ok(cuda.cuMemFree_v2(u64({own})))")
    else:
        one.end()
    assert other.do(f"wrong({there}, 20 * MIB, 1)") == 0
    assert other.do("used_mib()") == driver.used_mib() == 20
    other.do("alloc(4)")  # it has caught up with the end of the other one
    assert content_mib(driver) - before in range(20, 24)
    other.do(f"ok(unmap({there}, 20))")
    assert content_mib(driver) - before < 4


def test_a_new_block_has_nothing_of_one_that_another_process_wrote(driver, owner):
    one, other = owner(driver), owner(driver)
    at, there = lend(one, other)
    other.do(f"ok(launch('write', {there}, 2 * MIB, 1, 0)) or ok(done()) or ok(unmap({there}))")
    one.do(f"ok(unmap({at}))")
    again = [one.do("blocks(1)") for _ in range(3)]
    assert [one.do(f"any(ctypes.string_at({block}, 2 * MIB))") for block in again] == [False] * 3


def test_dirty_memory_is_dirty_in_blocks_too(driver, owner):
    one = owner(driver, TANGRAM_FAKE_DIRTY="1")
    assert one.do(f"cell({one.do('blocks(1)')})") == 0xA5A5A5A5


def test_thousands_of_blocks_can_be_shared_again_and_again(driver, owner):
    one = owner(driver)
    for _ in range(2):
        one.do("kept.extend(create() for _ in range(6000))")
        one.do("[close(export(handle)) for handle in kept]")
        assert one.do("used_mib()") == 12000
        one.do("[ok(cuda.cuMemRelease(u64(handle))) for handle in kept] and kept.clear()")
        assert one.do("used_mib()") == 0


def test_a_fill_with_zeros_takes_no_host_memory(driver, owner):
    one, before = owner(driver), content_mib(driver)
    at = one.do("alloc(4096 * MIB)")
    one.do(f"put({at} + 4096 * MIB - 4, 1) or ok(fill_now({at}, 0, 4096 * MIB))")
    assert content_mib(driver) - before < 4
    assert one.do(f"cell({at} + 4096 * MIB - 4)") == 0


def test_what_mapped_memory_answers_where_plain_memory_answers_otherwise(driver, owner):
    one = owner(driver)
    block, plain = one.do("blocks(1)"), one.do("alloc(2 * MIB)")
    handle = "ctypes.create_string_buffer(64)"
    setting = "cuda.cuPointerSetAttribute(ctypes.byref(ctypes.c_uint(1)), {}, u64({}))"
    assert one.do(f"cuda.cuIpcGetMemHandle({handle}, u64({block}))") == INVALID_VALUE
    assert one.do(f"cuda.cuIpcGetMemHandle({handle}, u64({plain}))") == 0
    assert one.do(setting.format(SYNC_MEMOPS, block)) == NOT_SUPPORTED
    assert one.do(setting.format(SYNC_MEMOPS, plain)) == 0
    assert one.do(f"attribute({block}, {CONTEXT})") == [0, 0]
    assert one.do(f"attribute({plain}, {CONTEXT}) == [0, context.value]")
    assert one.do(f"attribute({block}, {LEGACY_IPC})[1] & 0xFFFFFFFF") == 0
    assert one.do(f"attribute({plain}, {LEGACY_IPC})[1] & 0xFFFFFFFF") == 1


def test_a_file_can_be_registered_and_copied_to(driver, owner, tmp_path):
    file = tmp_path / "pool"
    file.write_bytes(bytes(4 * MIB))
    one = owner(driver)
    there = one.do(f"map_file({str(file)!r}, 4 * MIB)")
    one.do(f"ok(cuda.cuMemHostRegister_v2(ctypes.c_void_p({there}), u64(4 * MIB), 1))")
    at = one.do("blocks(2)")
    one.do(f"ok(launch('write', {at}, 4 * MIB, 8, 0)) or ok(copy({there}, {at}, 4 * MIB, 0)) or ok(done())")
    assert one.do(f"wrong({there}, 4 * MIB, 8)") == 0
    assert any(file.read_bytes()), "it is in the file"
    one.do(f"ok(cuda.cuMemHostUnregister(ctypes.c_void_p({there})))")

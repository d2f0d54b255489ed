"""Two GPUs of one process: what a kernel, a copy and a pool of one may use of the other's memory, as cuda.h documents it."""

from __future__ import annotations

import pytest

MIB = 1 << 20
INVALID_VALUE, INVALID_DEVICE, INVALID_CONTEXT = 1, 101, 201
UNSUPPORTED, ILLEGAL_ADDRESS, ALREADY_ENABLED, NOT_ENABLED = 217, 700, 704, 705


@pytest.fixture
def two(fake_driver, owner):
    """A process with a context on each of two GPUs; the second is current."""
    one = owner(fake_driver("gpu h200 count=2 context_mib=0"))
    one.do("on_gpu(1)")
    return one


def kernel(one, at, size=2 * MIB):
    """The error of a kernel of the current context that writes there."""
    one.do(f"ok(launch('write', {at}, {size}, 7, 0))")
    return one.do("done()")


def test_a_kernel_uses_plain_memory_of_another_gpu_only_with_access(two):
    at = two.do("alloc(2 * MIB)")
    two.do("on_gpu(0)")
    assert two.do("enable(1)") == 0
    assert kernel(two, at) == 0
    assert two.do(f"wrong({at}, 2 * MIB, 7)") == 0
    two.do("on_gpu(1)")
    later = two.do("alloc(4096)")
    two.do("on_gpu(0)")
    assert kernel(two, later, 4096) == 0, "what is allocated later, too"
    assert two.do("disable(1)") == 0
    assert kernel(two, at) == ILLEGAL_ADDRESS
    assert two.do("cuda.cuCtxSynchronize()") == ILLEGAL_ADDRESS, "and stays"


def test_without_any_call_there_is_no_access_and_it_is_in_one_direction(two):
    at = two.do("alloc(2 * MIB)")
    two.do("on_gpu(0)")
    zero = two.do("alloc(2 * MIB)")
    two.do("ok(enable(1))")
    two.do("on_gpu(1)")
    assert kernel(two, at) == 0
    assert kernel(two, zero) == ILLEGAL_ADDRESS


def test_the_errors_of_enabling_and_disabling(two):
    two.do("on_gpu(0, 'second')")
    two.do("on_gpu(0)")
    assert two.do("disable(1)") == NOT_ENABLED
    assert two.do("enable(1, flags=1)") == INVALID_VALUE
    assert two.do("enable(0)") == UNSUPPORTED, "itself: measured on two H200"
    assert two.do("enable(0, 'second')") == UNSUPPORTED, "its own device"
    assert two.do("cuda.cuCtxEnablePeerAccess(None, 0)") == INVALID_CONTEXT
    assert [two.do("enable(1)"), two.do("enable(1)")] == [0, ALREADY_ENABLED]
    assert [two.do("disable(1)"), two.do("disable(1)")] == [0, NOT_ENABLED]
    assert [two.do(f"can_access({a}, {b})") for a, b in ((0, 1), (1, 0), (0, 0))] == [1, 1, 0]


def test_access_is_of_one_context_and_ends_with_it_and_with_its_peer(two):
    two.do("on_gpu(1, 'second')")
    at = two.do("alloc(4096)")
    two.do("on_gpu(0)")
    two.do("ok(enable(1, 'second'))")
    assert kernel(two, at, 4096) == 0
    two.do("end_context(1, 'second')")
    two.do("on_gpu(1, 'second')")
    again = two.do("alloc(4096)")
    two.do("on_gpu(0)")
    assert two.do("enable(1)") == 0, "of another context of that GPU"
    assert kernel(two, again, 4096) == ILLEGAL_ADDRESS, "the context that has its place is another one"


def test_mapped_memory_has_its_own_access(two):
    at = two.do("block_on(1, {1: 3})")
    two.do("on_gpu(0)")
    two.do("ok(enable(1))")
    assert two.do(f"[access_of({at}, 0), access_of({at}, 1)]") == [0, 3]
    two.do(f"ok(open_to({at}, {{0: 3}}))")
    assert kernel(two, at) == 0
    two.do("ok(disable(1))")
    assert kernel(two, at) == 0, "that is not of cuCtxDisablePeerAccess"
    two.do(f"ok(open_to({at}, {{0: 0}}))")
    assert kernel(two, at) == ILLEGAL_ADDRESS
    two.do("on_gpu(1)")
    assert kernel(two, at) == 0, "its own GPU's is as it was"
    assert two.do(f"open_to({at}, {{9: 3}})") == INVALID_DEVICE
    assert two.do(f"open_to({at}, {{1: 2}})") == INVALID_VALUE


def test_a_pools_memory_has_the_pools_access(two):
    at = two.do("alloc_async(2 * MIB)")
    two.do("on_gpu(0)")
    pool = "cuda.cuDeviceGetDefaultMemPool(ctypes.byref(kept[-1]), 1)"
    two.do("kept.append(ctypes.c_void_p())")
    two.do(f"ok({pool})")
    two.do("ok(enable(1))")
    two.do("ok(open_pool(kept[-1], 0, 3))")
    assert kernel(two, at) == 0
    two.do("ok(open_pool(kept[-1], 0, 0))")
    assert kernel(two, at) == ILLEGAL_ADDRESS


def test_copies_of_plain_memory_need_no_access_and_those_of_mapped_memory_do(two):
    plain, mapped = two.do("alloc(2 * MIB)"), two.do("block_on(1, {1: 3})")
    two.do("on_gpu(0)")
    here = two.do("alloc(2 * MIB)")
    assert kernel(two, here) == 0
    assert two.do(f"copy_now({plain}, {here}, 2 * MIB)") == 0
    assert two.do(f"wrong({plain}, 2 * MIB, 7)") == 0
    assert two.do(f"copy_now({mapped}, {here}, 2 * MIB)") == INVALID_VALUE
    assert two.do(f"copy({mapped}, {here}, 2 * MIB, stream())") == INVALID_VALUE
    assert two.do(f"copy_peer({mapped}, 1, {here}, 0, 2 * MIB)") == 0, "each end by its own context"
    assert two.do(f"wrong({mapped}, 2 * MIB, 7)") == 0
    two.do(f"ok(open_to({mapped}, {{0: 3}}))")
    assert two.do(f"copy_now({mapped}, {here}, 2 * MIB)") == 0


def test_gpus_that_are_not_connected_so_have_no_access(fake_driver, owner):
    one = owner(fake_driver("gpu h200 count=2 context_mib=0"), TANGRAM_FAKE_P2P="0")
    one.do("on_gpu(1)")
    assert one.do("[can_access(1, 0), enable(0)]") == [0, UNSUPPORTED]
    at = one.do("block_on(1, {1: 3})")
    assert one.do(f"open_to({at}, {{0: 3}})") == INVALID_DEVICE

"""What a context loses beside allocations is what an H200 was seen to lose (bench/granularity)."""

from __future__ import annotations

import pytest

from tests.images import cubin, fatbin

MIB = 1 << 20
OUT_OF_MEMORY, INVALID_VALUE, NOT_FOUND, NO_BINARY = 2, 1, 500, 209
STACK, PRINTF, HEAP = 0, 1, 2
THREADS = 132 * 2048
CONTEXT_MIB = 528
HEAD = ".version 8.0\n.target sm_80\n"


@pytest.fixture
def driver(fake_driver):
    return fake_driver("gpu h200")


def lost_mib(driver) -> float:
    return driver.used_mib() - CONTEXT_MIB


@pytest.mark.parametrize(
    ("limit", "mib"), [(0, -264), (512, -132), (1024, 0), (2048, 264), (65536, 16896 - 264), (1040, 6)]
)
def test_stacks_are_lost_at_the_call_and_back_when_lowered(driver, worker, limit, mib):
    """A limit x the threads that the GPU can have at once; what the context costs has 1,024 bytes each in it."""
    one = worker(driver)
    one.must("set_limit", STACK, limit)
    assert lost_mib(driver) == mib
    one.must("set_limit", STACK, 1024)
    assert lost_mib(driver) == 0


def test_a_stack_that_does_not_fit_or_no_gpu_takes_is_refused(fake_driver, worker):
    driver = fake_driver("gpu h200 memory_mib=1000 context_mib=528")
    one = worker(driver)
    assert one.request("set_limit", STACK, 65536)[0] == OUT_OF_MEMORY
    assert one.request("set_limit", STACK, 524288)[0] == INVALID_VALUE
    assert (one.must("limit", STACK), lost_mib(driver)) == (1024, 0)


@pytest.mark.parametrize("how", ["//fake deep local=1504\n", ""], ids=["comment", "array"])
def test_the_first_launch_of_a_deep_kernel_makes_the_stacks_grow(driver, worker, how):
    one = worker(driver)
    arrays = "" if how else "  .local .align 4 .b8 __local_depot0[1504];\n"
    text = f"{HEAD}{how}.visible .entry deep() {{\n{arrays}  ret;\n}}\n.visible .entry flat() {{ ret; }}\n"
    module = one.must("load", text)
    deep, flat = one.must("kernel", module, "deep"), one.must("kernel", module, "flat")
    assert [one.must("local_bytes", kernel) for kernel in (deep, flat)] == [1504, 0]
    one.must("launch_function", flat)
    assert lost_mib(driver) == 0, "nothing at load, get or attribute"
    one.must("launch_function", deep)
    assert (lost_mib(driver) * MIB, one.must("limit", STACK)) == (130_023_424, 1504)
    one.must("launch_function", flat)
    assert lost_mib(driver) * MIB == 130_023_424


def test_a_deep_kernel_that_does_not_fit_is_refused_at_its_launch(fake_driver, worker):
    one = worker(fake_driver("gpu h200 memory_mib=600 context_mib=528"))
    deep = one.must("kernel", one.must("load", "//fake deep local=4096\n.entry deep() {}\n"), "deep")
    assert one.request("launch_function", deep)[0] == OUT_OF_MEMORY


@pytest.mark.parametrize("call", [".extern .func (.param .b32 r) vprintf\n", ".extern .func (.param .b64 r) malloc\n"])
def test_kernels_that_print_or_allocate_lose_memory_at_load(driver, worker, call):
    one = worker(driver)
    one.must("load", f"{HEAD}{call}.visible .entry kernel() {{ ret; }}\n")
    assert lost_mib(driver) * MIB == 146_800_640


def test_a_larger_heap_is_lost_at_the_first_launch_that_uses_it(driver, worker):
    one = worker(driver)
    one.must("set_limit", PRINTF, 1 << 30)
    one.must("set_limit", HEAP, 1 << 30)
    assert lost_mib(driver) == 0
    module = one.must("load", f"{HEAD}.extern .func (.param .b64 r) malloc\n.visible .entry kernel() {{ ret; }}\n")
    before = lost_mib(driver)
    one.must("launch_function", one.must("kernel", module, "kernel"))
    assert lost_mib(driver) == before + 1026


def test_every_fourth_stream_takes_a_block_that_stays(driver, worker):
    one = worker(driver)
    streams = [one.must("stream")]
    assert lost_mib(driver) == 0
    streams += [one.must("stream") for _ in range(9)]
    assert lost_mib(driver) == 6
    for stream in streams:
        one.must("stream_end", stream)
    assert lost_mib(driver) == 6
    for _ in range(10):
        one.must("stream")
    assert lost_mib(driver) == 6, "they are used again"


def test_each_context_of_a_process_costs_the_same(driver, worker):
    one = worker(driver)
    one.must("context", 0)
    assert driver.used_mib() == 2 * CONTEXT_MIB


def test_what_a_context_lost_is_back_when_it_ends(driver, worker):
    one = worker(driver, None)
    one.must("cuInit")
    one.must("retain", 0)
    one.must("set_limit", STACK, 2048)
    one.must("stream")
    one.must("stream")
    one.must("load", f"{HEAD}.extern .func (.param .b32 r) vprintf\n.global .u32 a;")
    assert lost_mib(driver) > 264
    one.must("release", 0)
    assert driver.used_mib() == 0


PTX = f"{HEAD}.global .align 4 .b8 table[12];\n.visible .global .u64 large[1048576];\n".encode() + bytes(4)
IMAGES = {
    "ptx": PTX,
    "cubin": cubin(table=12, large=8 * MIB),
    "fatbin of both": fatbin((1, 90, b"//\0"), (2, 90, cubin(table=12, large=8 * MIB)), (2, 80, cubin(other=4))),
    "fatbin of ptx": fatbin((2, 80, cubin(other=4)), (1, 50, PTX), (1, 100, b"//\0")),
}


@pytest.mark.parametrize("image", IMAGES)
def test_variables_are_found_and_lost_whatever_the_image(driver, worker, image):
    one = worker(driver)
    module = one.must("load_bytes", IMAGES[image].hex())
    assert lost_mib(driver) == 10
    table, large = one.must("variable", module, "table"), one.must("variable", module, "large")
    assert (table[1], large[1]) == (12, 8 * MIB)
    one.must("write", large[0] + 8 * MIB - 4, "end")
    one.must("write", table[0], "begin")
    assert one.must("read", large[0] + 8 * MIB - 4, 3) == "end"
    assert one.request("variable", module, "other")[0] == NOT_FOUND
    assert one.request("free", table[0])[0] == INVALID_VALUE
    one.must("unload", module)
    assert lost_mib(driver) == 0


@pytest.mark.parametrize(
    ("statement", "size"),
    [
        (".visible .global .u32 v;", 4),
        (".global .align 16 .v4 .f32 v;", 16),
        (".global .align 8 .f64 v[3][5];", 120),
        (".global .b64 v = 7;", 8),
        (".global .align 2 .b16 v[2] = {1, 2};", 4),
        (".extern .global .u32 v;", None),
        (".visible .entry f(.param .u64 .ptr .global .align 4 v) { ld.global .u32 v; }", None),
    ],
)
def test_a_variable_of_ptx_has_the_size_of_its_type(driver, worker, statement, size):
    one = worker(driver)
    rc, (_, found) = one.request("variable", one.must("load", HEAD + statement + "\n"), "v")
    assert (rc, found) == ((0, size) if size else (NOT_FOUND, 0))


def test_a_module_that_outlives_its_context_leaves_the_next_one_alone(driver, worker):
    one = worker(driver, None)
    one.must("cuInit")
    one.must("retain", 0)
    old = one.must("load", f"{HEAD}.global .u32 v;")
    one.must("release", 0)
    one.must("retain", 0)
    one.must("load", f"{HEAD}.global .u32 v;")
    one.must("unload", old)
    assert lost_mib(driver) == 2


def test_a_fatbin_for_other_gpus_is_refused(driver, worker):
    image = fatbin((2, 80, cubin(other=4)), (2, 100, cubin(other=4)), (1, 100, PTX))
    assert worker(driver).request("load_bytes", image.hex())[0] == NO_BINARY

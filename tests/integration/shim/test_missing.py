"""A driver that lacks a function: no call ends the program, and the limit is enforced or reported as not enforced."""

from __future__ import annotations

import re

import pytest

from tests.integration.shim.conftest import GPUS, OUT_OF_MEMORY, ROOT, Stage
from vgpu.api.codec import grant_to_text
from vgpu.api.grant import Grant, GrantGpu

SOURCES = {path.name: path.read_text() for path in (ROOT / "shim/src").rglob("*.[ch]")}
HOOKS = (ROOT / "shim/src/hooks/hooks.def").read_text()
NEEDED = re.findall(r"^(?:HOOK_)?NEEDED\((\w+),", HOOKS, re.MULTILINE)
OUR_OWN_CALLS = set(re.findall(r"^(?:REAL|(?:HOOK_)?NEEDED)\((\w+),", HOOKS, re.MULTILINE)) | {
    "cuEventQuery", "cuGraphExecDestroy", "cuIpcCloseMemHandle", "cuLaunchKernel", "cuMemFreeAsync", "cuMemFree_v2", "cuMemRelease",
    "cuMemsetD8Async", "cuModuleGetFunction", "cuModuleLoadData", "cuStreamCreate", "cuStreamDestroy_v2", "cuStreamQuery",
    "cuStreamSynchronize", "cuDevicePrimaryCtxRetain", "cuDevicePrimaryCtxRelease_v2", "cuGetProcAddress", "cuGetProcAddress_v2",
    "cuMemPoolTrimTo", "cuDeviceGraphMemTrim", "cuMemAddressFree", "cuMemSetAccess",
}  # fmt: skip
"""What the library calls by itself, inside the hook of another function."""

SYMBOLS = re.findall(r"^S\(\w+, \d+, (\w+)\)", (ROOT / "shim/fake/cuda/symbols.def").read_text(), re.MULTILINE)
CAN_BE_MISSING = sorted(OUR_OWN_CALLS & set(SYMBOLS))
PATHS = ("alloc", "stream_alloc", "default_pool", "create", "array_of", "graph_of")


def test_no_pointer_of_the_driver_is_compared_with_null_or_set_elsewhere() -> None:
    """They are never NULL: shim/src/hooks/missing.h."""
    wrong = re.compile(r"(?:driver(?:\.|->)cu|management(?:\.|->)nvml)\w+\s*(?:[=!]=\s*NULL|=[^=])")
    assert [f"{name}: {found}" for name, text in SOURCES.items() for found in wrong.findall(text)] == []
    assert wrong.findall("if (tangram.driver.cuMemGetInfo == NULL)") != []


def test_where_nothing_is_missing_the_whole_walk_is_gone_and_every_path_ends_at_the_limit(stage: Stage) -> None:
    gpu = stage.worker()
    assert set(gpu.must("__import__('walk').walk()").values()) == {0}
    for path in PATHS:
        assert gpu.must(f"__import__('walk').fill({path!r}, 100, 12)") == OUT_OF_MEMORY or path == "graph_of"
        assert 800 <= stage.true_mib(gpu) <= 1000 or path == "graph_of"
        gpu.must("__import__('walk').empty()")


@pytest.mark.parametrize("name", CAN_BE_MISSING)
def test_a_missing_function_ends_no_program_and_no_limit_in_silence(stage: Stage, name: str) -> None:
    gpu = GrantGpu(GPUS[0], 1000)
    stage.write_grant(grant_to_text(Grant("default", "a", "1", "main", (gpu,), clear=True)))
    worker = stage.bare_worker(TANGRAM_FAKE_FAULTS=f"missing {name}")
    try:
        rc, *_ = worker.request("__import__('walk').called(use)")
        codes = worker.must("__import__('walk').walk()") if rc == 0 else {}
        over = []
        for path in PATHS:
            worker.must(f"__import__('walk').fill({path!r}, 100, 12)")
            over += [path] if stage.true_mib(worker) > 1000 else []
            worker.must("__import__('walk').empty()")
    finally:
        errors = worker.end()
    assert all(isinstance(code, int) for code in codes.values())
    if name in NEEDED:
        assert f"this driver lacks {name}" in errors
    else:
        assert over == [], "the limit is enforced without it"

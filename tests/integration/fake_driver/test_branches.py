"""The fake is a driver of one branch: its versions, and the functions that branch has."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

GPU = "gpu h200 context_mib=0"
VERSIONS = {
    "535": ("535.183.06", 12020),
    "550": ("550.127.08", 12040),
    "570": ("570.124.06", 12080),
    "580": ("580.65.06", 13000),
    "595": ("595.45.04", 13020),
    "unknown": ("999.10.01", 13990),
}
SINCE = {
    "cuCtxFromGreenCtx": 12040,
    "cuCtxCreate_v4": 12050,
    "cuStreamGetDevice_ptsz": 12080,
    "cuMemGetDefaultMemPool": 13000,
    "cuMemAlloc_v2": 3020,
}
LOOK = """
import ctypes, json, sys
cuda, nvml = ctypes.CDLL("libcuda.so.1"), ctypes.CDLL("libnvidia-ml.so.1")
version, text = ctypes.c_int(), ctypes.create_string_buffer(96)
before = [cuda.cuDriverGetVersion(ctypes.byref(version)), version.value, nvml.nvmlSystemGetCudaDriverVersion(ctypes.byref(version)), version.value]
assert cuda.cuInit(0) == 0 and nvml.nvmlInit_v2() == 0
at, status = ctypes.c_void_p(), ctypes.c_int()
assert cuda.cuGetProcAddress_v2(b"cuCtxSynchronize", ctypes.byref(at), 13000, ctypes.c_uint64(0), ctypes.byref(status)) == 0
newest = [name for name in ("cuCtxSynchronize", "cuCtxSynchronize_v2") if at.value == ctypes.cast(getattr(cuda, name, None), ctypes.c_void_p).value]
assert nvml.nvmlSystemGetDriverVersion(text, 96) == 0
print(json.dumps({
    "before": before, "driver": text.value.decode(), "newest": newest,
    "has": [name for name in sys.argv[1:] if hasattr(cuda, name) or hasattr(nvml, name)],
}))
"""


def look(driver) -> dict[str, object]:
    names = [*SINCE, "nvmlDeviceGetNumaNodeId", "nvmlDeviceGetName"]
    done = subprocess.run(
        [sys.executable, "-c", LOOK, *names], env=driver.env(), capture_output=True, text=True, check=True
    )
    found: dict[str, object] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("branch", VERSIONS)
def test_a_branch_has_its_versions_and_no_function_that_came_later(fake_driver, branch):
    release, cuda = VERSIONS[branch]
    found = look(fake_driver(f"driver {branch}\n{GPU}"))
    assert (found["before"], found["driver"]) == ([0, cuda, 0, cuda], release)
    later = [] if branch == "535" else ["nvmlDeviceGetNumaNodeId"]
    assert found["has"] == [name for name, since in SINCE.items() if since <= cuda] + [*later, "nvmlDeviceGetName"]
    assert found["newest"] == ["cuCtxSynchronize_v2" if cuda >= 13000 else "cuCtxSynchronize"]


def test_a_program_that_starts_after_an_upgrade_finds_the_new_driver(fake_driver):
    driver = fake_driver(f"driver 550\n{GPU}")
    assert look(driver)["driver"] == "550.127.08"
    driver.ctl("driver", "595")
    assert look(driver)["driver"] == "595.45.04"


def test_a_version_of_no_branch_here_is_answered_as_it_is(fake_driver):
    assert look(fake_driver(f"driver 580.159.04\n{GPU}"))["driver"] == "580.159.04"

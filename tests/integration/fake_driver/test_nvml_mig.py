"""What the fake NVML changes of MIG, as NVIDIA's nvml.h describes it, and its tables against those of vgpu.api.mig_tables."""

from __future__ import annotations

import pytest

from vgpu.api.mig_tables import model_of

MODELS = ["a100-40", "a100-80", "h100", "h100-96", "h200", "b200", "b300", "rtx-pro-6000"]

KIT = """
g = n.nvmlDeviceGetHandleByIndex(0)
def failing(call, *words):
    try: call(*words); return 0
    except n.NVMLError as error: return error.value
def profiles():
    for number in range(n.NVML_GPU_INSTANCE_PROFILE_COUNT):
        try: yield n.nvmlDeviceGetGpuInstanceProfileInfoV(g, number)
        except n.NVMLError_NotSupported: continue
def placements(id):
    # pynvml asks for the number first, and then for the list
    import ctypes
    count = ctypes.c_uint(0)
    call = n._nvmlGetFunctionPointer("nvmlDeviceGetGpuInstancePossiblePlacements_v2")
    n._nvmlCheckReturn(call(g, ctypes.c_uint(id), None, ctypes.byref(count)))
    found = (n.c_nvmlGpuInstancePlacement_t * count.value)()
    n._nvmlCheckReturn(call(g, ctypes.c_uint(id), found, ctypes.byref(count)))
    return [(one.start, one.size) for one in found]
def at(start, size):
    import ctypes
    return ctypes.byref(n.c_nvmlGpuInstancePlacement_t(start, size))
def devices():
    found = []
    for i in range(7):
        try: found.append(n.nvmlDeviceGetName(n.nvmlDeviceGetMigDeviceHandleByIndex(g, i)).split("MIG ")[1])
        except n.NVMLError_NotFound: break
    return found
"""


@pytest.mark.parametrize("model", MODELS)
def test_the_fakes_profiles_and_placements_are_those_of_the_tables(fake_driver, nvml_python, model):
    code = (
        KIT
        + """
rows = [[p.name.replace("MIG ", "").replace("+", "."), p.id, p.sliceCount, p.decoderCount, p.ofaCount, placements(p.id)] for p in profiles()]
print(json.dumps([n.nvmlDeviceGetName(g), rows]))
"""
    )
    name, rows = nvml_python(fake_driver(f"gpu {model}\nmig 0"), code)
    of = model_of(name)
    assert of is not None
    expected = [
        [p.name, p.number, p.compute, p.decoders, p.flow_engines, [[start, p.memory] for start in p.starts]]
        for p in of.table.profiles
    ]
    assert sorted(rows) == sorted(expected)


def test_an_instance_is_created_where_it_is_wanted_and_is_a_device_with_its_compute_instance(fake_driver, nvml_python):
    driver = fake_driver("gpu h200\nmig 0")
    code = (
        KIT
        + """
gi = n.nvmlDeviceCreateGpuInstanceWithPlacement(g, 9, at(0, 4))
info = n.nvmlGpuInstanceGetInfo(gi)
before = devices()
ci = n.nvmlGpuInstanceCreateComputeInstance(gi, 2)
after = devices()
overlaps = failing(n.nvmlDeviceCreateGpuInstanceWithPlacement, g, 14, at(2, 2))
nowhere = failing(n.nvmlDeviceCreateGpuInstanceWithPlacement, g, 9, at(1, 4))
still = failing(n.nvmlGpuInstanceDestroy, gi)
left = n.nvmlDeviceGetGpuInstanceRemainingCapacity(g, 19)
n.nvmlComputeInstanceDestroy(ci)
n.nvmlGpuInstanceDestroy(gi)
print(json.dumps([info.id, info.placement.start, before, after, overlaps, nowhere, still, left, devices()]))
"""
    )
    assert nvml_python(driver, code) == [1, 0, [], ["3g.71gb"], 23, 2, 19, 3, []]


def test_mig_mode_of_a_gpu_in_use_stays_pending_and_an_instance_in_use_stays(fake_driver, nvml_python):
    driver = fake_driver("gpu h200\nmig 0\ngpu h200\nprocess 1 4711 100 train")
    code = (
        KIT
        + """
other = n.nvmlDeviceGetHandleByIndex(1)
activation = ctypes.c_uint(99)
rc = n._nvmlGetFunctionPointer("nvmlDeviceSetMigMode")(other, 1, ctypes.byref(activation))
print(json.dumps([rc, activation.value, n.nvmlDeviceGetMigMode(other), failing(n.nvmlDeviceCreateGpuInstance, other, 19)]))
"""
    )
    assert nvml_python(driver, "import ctypes\n" + code) == [0, 19, [0, 1], 3]
    driver.ctl("gone", 4711)
    assert nvml_python(driver, "import ctypes\n" + code) == [0, 0, [1, 1], 0]
    driver.ctl("mig", 0, "create", "7g.141gb")
    driver.ctl("process", "0:0", 4712, 100, "train")
    code = (
        KIT
        + """
gi = n.nvmlDeviceGetGpuInstanceById(g, 0)
print(json.dumps([failing(n.nvmlComputeInstanceDestroy, n.nvmlGpuInstanceGetComputeInstanceById(gi, 0)), devices()]))
"""
    )
    assert nvml_python(driver, code) == [19, ["7g.141gb"]]


def test_media_engines_bound_what_stands_together(fake_driver, nvml_python):
    driver = fake_driver("gpu rtx-pro-6000\nmig 0 1g.24gb.me.all")
    code = (
        KIT
        + """
print(json.dumps([failing(n.nvmlDeviceCreateGpuInstance, g, 14), failing(n.nvmlDeviceCreateGpuInstance, g, 67)]))
"""
    )
    assert nvml_python(driver, code) == [23, 0]

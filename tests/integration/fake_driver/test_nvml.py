"""pynvml, unchanged, sees the GPUs as described."""

from __future__ import annotations

import json
import subprocess
import sys
import time

import pytest

MIB = 1 << 20


def test_pynvml_reads_what_a_gpu_is(fake_driver, nvml_python):
    driver = fake_driver(
        "gpu h200 uuid=GPU-01234567-89ab-cdef-0123-456789abcdef bus=0001:3b:00.0 numa=1 minor=5 serial=S77\ngpu t4 bus=0002:29:00.0"
    )
    code = """
h = n.nvmlDeviceGetHandleByIndex(0); pci = n.nvmlDeviceGetPciInfo(h); m = n.nvmlDeviceGetMemoryInfo(h)
m2 = n.nvmlDeviceGetMemoryInfo(h, version=n.nvmlMemory_v2)
print(json.dumps(dict(count=n.nvmlDeviceGetCount(), name=n.nvmlDeviceGetName(h), uuid=n.nvmlDeviceGetUUID(h), bus=pci.busId,
  legacy=pci.busIdLegacy.decode() if isinstance(pci.busIdLegacy, bytes) else pci.busIdLegacy, pci_id=pci.pciDeviceId,
  minor=n.nvmlDeviceGetMinorNumber(h), serial=n.nvmlDeviceGetSerial(h), total=m.total >> 20,
  total2=m2.total >> 20, cc=n.nvmlDeviceGetCudaComputeCapability(h), arch=n.nvmlDeviceGetArchitecture(h),
  driver=n.nvmlSystemGetDriverVersion(), cuda=n.nvmlSystemGetCudaDriverVersion(), brand=n.nvmlDeviceGetBrand(h),
  by_uuid=n.nvmlDeviceGetIndex(n.nvmlDeviceGetHandleByUUID(n.nvmlDeviceGetUUID(h))),
  by_bus=n.nvmlDeviceGetIndex(n.nvmlDeviceGetHandleByPciBusId("0001:3b:00.0")),
  by_serial=n.nvmlDeviceGetIndex(n.nvmlDeviceGetHandleBySerial("S77")), sum=[m.free + m.used == m.total,
  m2.free + m2.used + m2.reserved == m2.total], power=n.nvmlDeviceGetPowerManagementLimit(h),
  clock=n.nvmlDeviceGetMaxClockInfo(h, n.NVML_CLOCK_SM), affinity=list(n.nvmlDeviceGetMemoryAffinity(h, 1, 0)))))
"""
    gpu = nvml_python(driver, code)
    assert gpu == {
        "count": 2,
        "name": "NVIDIA H200",
        "uuid": "GPU-01234567-89ab-cdef-0123-456789abcdef",
        "bus": "00000001:3B:00.0",
        "legacy": "0001:3B:00.0",
        "pci_id": 0x233510DE,
        "minor": 5,
        "serial": "S77",
        "total": 143771,
        "total2": 143771,
        "cc": [9, 0],
        "arch": 9,
        "driver": "580.65.06",
        "cuda": 13000,
        "brand": 14,
        "by_uuid": 0,
        "by_bus": 0,
        "by_serial": 0,
        "sum": [True, True],
        "power": 700000,
        "clock": 1980,
        "affinity": [2],
    }


def test_no_gpu_has_memory_of_its_own_numa_node(fake_driver, nvml_python):
    """As an H200 on x86 answers (measured, driver 580)."""
    code = """
try: print(n.nvmlDeviceGetNumaNodeId(n.nvmlDeviceGetHandleByIndex(0)))
except n.NVMLError_NotSupported: print(json.dumps("not supported"))
"""
    assert nvml_python(fake_driver("gpu h200 numa=1"), code) == "not supported"


def test_process_lists_name_host_pids_and_their_memory(fake_driver, worker, nvml_python):
    driver = fake_driver("gpu h200 context_mib=100\nprocess 0 4711 2048 trainer")
    one = worker(driver)
    one.must("alloc", 50 * MIB)
    code = """
h = n.nvmlDeviceGetHandleByIndex(0)
print(json.dumps([[p.pid, p.usedGpuMemory >> 20] for p in n.nvmlDeviceGetComputeRunningProcesses(h)]
  + [n.nvmlDeviceGetGraphicsRunningProcesses(h), n.nvmlSystemGetProcessName(4711), n.nvmlDeviceGetMemoryInfo(h).used >> 20]))
"""
    assert nvml_python(driver, code) == [[4711, 2048], [one.process.pid, 150], [], "trainer", 2048 + 150 + 615]


def test_managed_memory_is_in_use_and_listed_for_no_process(fake_driver, worker, nvml_python):
    driver = fake_driver("gpu h200 context_mib=100")
    one, other = worker(driver), worker(driver)
    one.must("alloc", 50 * MIB)
    made = [one.must(way, size) for way in ("managed", "managed_pool") for size in (30 * MIB, 512)]
    other.must("managed", 7 * MIB)
    code = """
h = n.nvmlDeviceGetHandleByIndex(0)
listed = sorted([p.pid, p.usedGpuMemory >> 20] for p in n.nvmlDeviceGetComputeRunningProcesses(h))
print(json.dumps([listed, n.nvmlDeviceGetMemoryInfo(h).used >> 20]))
"""
    listed = sorted([[one.process.pid, 150], [other.process.pid, 100]])
    managed = 30 + 2 + 30 + 2
    assert nvml_python(driver, code) == [listed, 250 + managed + 8 + 615]
    for at in made:
        one.must("free", at)
    one.must("synchronize")
    assert nvml_python(driver, code) == [listed, 250 + 8 + 615]
    one.must("managed", 30 * MIB)
    one.process.kill()
    one.process.wait()
    other.must("alloc", 1)
    assert nvml_python(driver, code) == [[[other.process.pid, 102]], 102 + 8 + 615]


def test_clients_of_mps_have_a_list_of_their_own(fake_driver, worker, nvml_python):
    driver = fake_driver("gpu h200 context_mib=100\nprocess 0 4711 30 nvidia-cuda-mps-server\ngpu h200 context_mib=100")
    one = worker(driver)
    one.must("alloc", 50 * MIB)
    code = """
def pids(of): return [[p.pid, p.usedGpuMemory >> 20] for p in of(n.nvmlDeviceGetHandleByIndex(0))]
print(json.dumps([pids(n.nvmlDeviceGetComputeRunningProcesses), pids(n.nvmlDeviceGetMPSComputeRunningProcesses)]))
"""
    assert nvml_python(driver, code) == [[[4711, 30]], [[one.process.pid, 150]]]
    driver.ctl("gone", 4711)
    assert nvml_python(driver, code) == [[[one.process.pid, 150]], []]


def test_a_process_of_a_container_is_named_by_its_pid_there(fake_driver):
    driver = fake_driver("gpu h200")
    code = "import os, pynvml as n; n.nvmlInit(); print(os.getpid(), n.nvmlSystemGetProcessName(os.getpid()))"
    done = subprocess.run(
        ["unshare", "--pid", "--fork", "--mount-proc", sys.executable, "-c", code],
        env=driver.env(), capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout.split() == ["1", sys.executable[:63]]


def test_nvlinks_and_topology_are_as_wired(fake_driver, nvml_python):
    driver = fake_driver("gpu a100-40 count=3\nlink 0 1 4\nlink 1 2 2\ngpu a10 numa=1")
    code = """
hs = [n.nvmlDeviceGetHandleByIndex(i) for i in range(4)]
def peers(h):
    found = {}
    for link in range(12):
        if n.nvmlDeviceGetNvLinkState(h, link):
            to = n.nvmlDeviceGetHandleByPciBusId(n.nvmlDeviceGetNvLinkRemotePciInfo(h, link).busId)
            found[n.nvmlDeviceGetIndex(to)] = found.get(n.nvmlDeviceGetIndex(to), 0) + 1
    return found
def nvlink(a, b): return n.nvmlDeviceGetP2PStatus(hs[a], hs[b], n.NVML_P2P_CAPS_INDEX_NVLINK)
print(json.dumps([peers(hs[0]), peers(hs[1]), n.nvmlDeviceGetTopologyCommonAncestor(hs[0], hs[1]),
  n.nvmlDeviceGetTopologyCommonAncestor(hs[0], hs[3]), nvlink(0, 1), nvlink(0, 2)]))
"""
    assert nvml_python(driver, code) == [{"1": 4}, {"0": 4, "2": 2}, 40, 50, 0, 5]


def test_links_to_switches_join_all_gpus(fake_driver, nvml_python):
    driver = fake_driver("gpu h200 count=2\nlinks all 18")
    code = """
a, b = (n.nvmlDeviceGetHandleByIndex(i) for i in range(2))
print(json.dumps([n.nvmlDeviceGetNvLinkRemoteDeviceType(a, 17), n.nvmlDeviceGetP2PStatus(a, b, n.NVML_P2P_CAPS_INDEX_NVLINK),
  n.nvmlDeviceGetFieldValues(a, [n.NVML_FI_DEV_NVLINK_LINK_COUNT])[0].value.uiVal]))
"""
    assert nvml_python(driver, code) == [2, 0, 18]


PROFILES = {  # NVIDIA's MIG user guide: how many of each fit on one GPU
    "a100-40": {"1g.5gb": 7, "1g.10gb": 4, "2g.10gb": 3, "3g.20gb": 2, "4g.20gb": 1, "7g.40gb": 1, "1g.5gb.me": 1},
    "a100-80": {"1g.10gb": 7, "1g.20gb": 4, "2g.20gb": 3, "3g.40gb": 2, "4g.40gb": 1, "7g.80gb": 1, "1g.10gb.me": 1},
    "h100": {"1g.10gb": 7, "1g.20gb": 4, "2g.20gb": 3, "3g.40gb": 2, "4g.40gb": 1, "7g.80gb": 1, "1g.10gb.me": 1},
    "h100-96": {"1g.12gb": 7, "1g.24gb": 4, "2g.24gb": 3, "3g.48gb": 2, "4g.48gb": 1, "7g.96gb": 1, "1g.12gb.me": 1},
    "h200": {"1g.18gb": 7, "1g.35gb": 4, "2g.35gb": 3, "3g.71gb": 2, "4g.71gb": 1, "7g.141gb": 1, "1g.18gb.me": 1},
    "b200": {"1g.23gb": 7, "1g.45gb": 4, "2g.45gb": 3, "3g.90gb": 2, "4g.90gb": 1, "7g.180gb": 1, "1g.23gb.me": 1},
    "b300": {"1g.34gb": 7, "1g.67gb": 4, "2g.67gb": 3, "3g.135gb": 2, "4g.135gb": 1, "7g.269gb": 1, "1g.34gb.me": 1},
    "rtx-pro-6000": {
        "1g.24gb": 4,
        "1g.24gb.me": 1,
        "1g.24gb.gfx": 4,
        "1g.24gb.me.all": 1,
        "1g.24gb-me": 4,
        "2g.48gb": 2,
        "2g.48gb.gfx": 2,
        "2g.48gb.me.all": 1,
        "2g.48gb-me": 2,
        "4g.96gb": 1,
        "4g.96gb.gfx": 1,
    },
}


@pytest.mark.parametrize(("model", "profile"), [(m, p) for m, ps in PROFILES.items() for p in ps])
def test_as_many_instances_of_a_profile_fit_as_nvidia_documents(fake_driver, model, profile):
    driver = fake_driver(f"gpu {model}\nmig 0 " + " ".join([profile] * PROFILES[model][profile]))
    assert len(driver.status()) == 1 + PROFILES[model][profile]
    with pytest.raises(AssertionError, match="does not fit"):
        driver.ctl("mig", 0, "create", profile)


def test_mig_devices_are_listed_with_their_slices(fake_driver, nvml_python):
    driver = fake_driver("gpu h200\nmig 0 3g.71gb 2g.35gb 1g.18gb 1g.18gb.me\ngpu h200")
    code = """
gpu = n.nvmlDeviceGetHandleByIndex(0); found = []
for i in range(n.nvmlDeviceGetMaxMigDeviceCount(gpu)):
    try: h = n.nvmlDeviceGetMigDeviceHandleByIndex(gpu, i)
    except n.NVMLError_NotFound: continue
    a = n.nvmlDeviceGetAttributes(h)
    assert n.nvmlDeviceGetHandleByUUID(n.nvmlDeviceGetUUID(h)) is not None and n.nvmlDeviceIsMigDeviceHandle(h)
    assert n.nvmlDeviceGetUUID(n.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(h)) == n.nvmlDeviceGetUUID(gpu)
    found.append([n.nvmlDeviceGetName(h), n.nvmlDeviceGetGpuInstanceId(h), n.nvmlDeviceGetComputeInstanceId(h),
      a.gpuInstanceSliceCount, a.multiprocessorCount, a.memorySizeMB, n.nvmlDeviceGetMemoryInfo(h).total >> 20])
print(json.dumps([n.nvmlDeviceGetMigMode(gpu), n.nvmlDeviceGetMigMode(n.nvmlDeviceGetHandleByIndex(1)), found]))
"""
    on, off, found = nvml_python(driver, code)
    assert (on, off) == ([1, 1], [0, 0])
    assert found == [
        ["NVIDIA H200 MIG 3g.71gb", 1, 0, 3, 60, 71424, 71424],
        ["NVIDIA H200 MIG 2g.35gb", 4, 0, 2, 32, 33280, 33280],
        ["NVIDIA H200 MIG 1g.18gb+me", 7, 0, 1, 16, 16384, 16384],
        ["NVIDIA H200 MIG 1g.18gb", 8, 0, 1, 16, 16384, 16384],
    ]


def test_a_mig_instance_is_a_device_of_its_own_size(fake_driver, worker):
    driver = fake_driver("gpu a100-40 context_mib=0\nmig 0 1g.5gb 1g.5gb")
    one, other = (s for s in driver.status() if s.gi is not None)
    first = worker(driver, CUDA_VISIBLE_DEVICES=one.uuid)
    second = worker(driver, CUDA_VISIBLE_DEVICES=other.uuid)
    first.must("alloc", 4864 * MIB)
    assert first.request("alloc", MIB)[0] == 2
    second.must("alloc", 4864 * MIB)
    assert first.must("uuid", 0) == one.uuid.removeprefix("MIG-").replace("-", "")


WATCH = """
import json, pynvml as n
n.nvmlInit()
events = n.nvmlEventSetCreate()
for i in range(n.nvmlDeviceGetCount()):
    n.nvmlDeviceRegisterEvents(n.nvmlDeviceGetHandleByIndex(i), n.nvmlEventTypeXidCriticalError, events)
print("watching", flush=True)
for _ in range(2):
    e = n.nvmlEventSetWait_v2(events, 20000)
    print(json.dumps([n.nvmlDeviceGetIndex(e.device), e.eventType, e.eventData]), flush=True)
try: n.nvmlEventSetWait_v2(events, 20)
except n.NVMLError_Timeout: print("quiet", flush=True)
"""


def test_an_xid_reaches_every_waiter(fake_driver):
    driver = fake_driver("gpu h200 count=2")
    with subprocess.Popen(
        [sys.executable, "-c", WATCH], env=driver.env(), stdout=subprocess.PIPE, text=True
    ) as watcher:
        assert watcher.stdout is not None
        assert watcher.stdout.readline() == "watching\n"
        start = time.monotonic()
        driver.xid(gpu=1, number=48)
        assert json.loads(watcher.stdout.readline()) == [1, 8, 48]
        driver.xid(gpu=0, number=79)
        assert json.loads(watcher.stdout.readline()) == [0, 8, 79]
        assert time.monotonic() - start < 15  # woken, not timed out
        assert watcher.stdout.readline() == "quiet\n"


def test_a_gpu_off_the_bus_is_lost_until_it_recovers(fake_driver, nvml_python, worker):
    driver = fake_driver("gpu h200 context_mib=0")
    one = worker(driver)
    code = """
try: print(json.dumps(n.nvmlDeviceGetMemoryInfo(n.nvmlDeviceGetHandleByIndex(0)).total >> 20))
except n.NVMLError_GpuIsLost: print('"lost"')
"""
    driver.xid(gpu=0, number=79)
    assert nvml_python(driver, code) == "lost"
    assert one.request("alloc", MIB)[0] == 46
    driver.recover(0)
    assert nvml_python(driver, code) == 143771
    one.must("alloc", MIB)


def test_without_a_daemon_nvml_reports_that_no_driver_is_loaded(fake_driver):
    driver = fake_driver()
    code = "import pynvml as n\ntry: n.nvmlInit()\nexcept n.NVMLError_DriverNotLoaded: print('none')"
    env = driver.env(TANGRAM_FAKE_DRIVER="/nowhere")
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    assert done.stdout == "none\n"


def test_nvidia_smi_lists_queries_and_draws(fake_driver, worker):
    driver = fake_driver("gpu h200 memory_mib=1000 context_mib=100\ngpu a100-40\nmig 1 1g.5gb")
    one = worker(driver)
    one.must("alloc", 100 * MIB)

    def smi(*words: str) -> str:
        command = [driver.libraries / "nvidia-smi", *words]
        return subprocess.run(command, env=driver.env(), capture_output=True, text=True, check=True).stdout

    gpus = driver.status()
    assert smi("-L").splitlines() == [
        f"GPU 0: NVIDIA H200 (UUID: {gpus[0].uuid})",
        f"GPU 1: NVIDIA A100-SXM4-40GB (UUID: {gpus[1].uuid})",
        f"  MIG 1g.5gb      Device  0: (UUID: {gpus[2].uuid})",
    ]
    query = smi("--query-gpu=memory.total,memory.used,uuid", "--format=csv").splitlines()
    assert query[:2] == ["memory.total [MiB], memory.used [MiB], uuid", f"1000 MiB, 200 MiB, {gpus[0].uuid}"]
    table = smi()
    assert "200MiB /    1000MiB" in table
    assert {len(line) for line in table.splitlines()} == {82}, "every line is as wide as the box"
    (row,) = [line for line in table.splitlines() if f" {one.process.pid} " in line]
    assert "python" in row


def test_many_threads_may_initialise_and_shut_down_at_once(fake_driver, nvml_python):
    code = """
import threading
def use():
    for _ in range(50):
        n.nvmlInit(); assert n.nvmlDeviceGetCount() == 1; n.nvmlShutdown()
ts = [threading.Thread(target=use) for _ in range(4)]
[t.start() for t in ts]; [t.join() for t in ts]
print(json.dumps(n.nvmlDeviceGetCount()))
"""
    assert nvml_python(fake_driver(), code) == 1


def test_a_gpu_has_the_facts_that_labels_of_its_node_say(fake_driver, nvml_python):
    code = """
from nvml import gpu_facts
gpus = [gpu_facts.gpu_at(index) for index in range(2)]
print(json.dumps([gpu_facts.count().cuda, [[gpu.arch, gpu.mig_capable, gpu.mig] for gpu in gpus]]))
"""
    assert nvml_python(fake_driver("gpu h200\ngpu t4"), code) == [
        "13.0",
        [["hopper", True, False], ["turing", False, False]],
    ]

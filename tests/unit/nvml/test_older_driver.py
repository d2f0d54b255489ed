"""A driver that lacks a function which Tangram calls: neutral values, or a sentence that names the oldest supported driver.

Each program runs in a process of its own, because pynvml loads a library once.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from nvml.binding import nv
from nvml.errors import NvmlError
from nvml.naming import naming
from tests.built import REPOSITORY
from tests.fake import FakeDriver, fake_driver
from tests.older import without
from vgpu.api.driver import OLDEST_BRANCH, too_old

__all__ = ["fake_driver"]

GPUS = "gpu a100-40 count=2\nlinks all 12\nmig 0 3g.20gb 1g.5gb.me 1g.5gb\n"
LISTS = {"nvmlDeviceGetComputeRunningProcesses_v3", "nvmlDeviceGetGraphicsRunningProcesses_v3"}
"""Newer forms that the oldest supported driver has, and drivers before 510 have not."""

EVERYTHING = """
import sys
from pathlib import Path
import msgspec
import pynvml
from nvml.child import Session
from nvml.inventory import probe
from nvml.queries import Nvml
from nvml.errors import NvmlError
from nvml.messages import OpenReply, OpenRequest

called, refused = set(), []
look_up = pynvml._nvmlGetFunctionPointer

def seen(name):
    called.add(name)
    return look_up(name)

def attempt(step):
    try:
        step()
    except NvmlError as error:
        refused.append(str(error))

class InThisProcess:
    def call_all(self, requests):
        return [session.answer(request) for request in requests]

def everything():
    nvml = Nvml(InThisProcess())
    nvml._call(OpenRequest(sys.argv[1]), OpenReply)
    uuid = probe(nvml, unit_mib=1, access="cdi").gpus[1].uuid
    for step in (nvml.answers, nvml.processes, lambda uuid: nvml.busy(uuid, 0, 10), lambda uuid: nvml.xids((uuid,))):
        attempt(lambda: step(uuid))

pynvml._nvmlGetFunctionPointer = seen
with Session() as session:
    attempt(everything)
print(msgspec.json.encode((sorted(called), refused)).decode())
"""


def older(driver: FakeDriver, root: Path, *missing: str) -> Path:
    """A driver root whose NVML lacks these functions."""
    (root / "lib").mkdir(parents=True)
    without(driver.libnvml, missing, root / "lib" / "libnvidia-ml.so.1")
    return root


def run(driver: FakeDriver, program: str, *words: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", program, *map(str, words)],
        cwd=REPOSITORY,
        env=driver.env(LD_LIBRARY_PATH=""),
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


def everything(driver: FakeDriver, root: Path) -> tuple[list[str], list[str]]:
    """Which functions of NVML were called when all that the package does was done, and the refusals."""
    done = run(driver, EVERYTHING, root)
    assert done.returncode == 0, done.stderr
    return msgspec.json.decode(done.stdout, type=tuple[list[str], list[str]])


def test_whichever_function_is_missing_there_is_a_neutral_value_or_a_sentence(
    fake_driver: Callable[[str], FakeDriver], tmp_path: Path
) -> None:
    driver = fake_driver(GPUS)
    called, refused = everything(driver, older(driver, tmp_path / "all"))
    assert not refused
    assert set(called) >= LISTS
    refusing = set()
    for name in called:
        _, refused = everything(driver, older(driver, tmp_path / name, name))
        assert all(f"the oldest supported driver is {OLDEST_BRANCH}" in sentence for sentence in refused), (
            name,
            refused,
        )
        if refused:
            refusing.add(name)
    needed = {
        "nvmlInitWithFlags",
        "nvmlDeviceGetMemoryInfo",
        "nvmlDeviceGetUUID",
        "nvmlDeviceGetMigDeviceHandleByIndex",
    }
    assert refusing >= LISTS | needed
    assert not refusing & {"nvmlDeviceGetMemoryAffinity", "nvmlDeviceGetNvLinkState", "nvmlDeviceGetFieldValues"}


def test_the_sentence_names_the_object_and_the_driver_that_is_there(
    fake_driver: Callable[[str], FakeDriver], tmp_path: Path
) -> None:
    driver = fake_driver("driver 470.57.02\ngpu t4 count=2\n")
    _, refused = everything(driver, older(driver, tmp_path, *LISTS))
    assert refused == [f"processes of GPU {driver.status()[1].uuid}: {too_old('470.57.02')}"]
    assert "NVIDIA driver 470.57.02 lacks" in refused[0]


def test_before_nvml_reports_its_version_the_sentence_does_without(
    fake_driver: Callable[[str], FakeDriver], tmp_path: Path
) -> None:
    driver = fake_driver(GPUS)
    root = older(driver, tmp_path, "nvmlInitWithFlags")
    assert everything(driver, root)[1] == [f"the NVIDIA driver of {root}: {too_old('')}"]


METER = """
import select, sys
from pathlib import Path
from arbiter.memory.meter import Meter
from arbiter.nvml_source import nvml_source
from nvml.supervisor import TimeLimits

with nvml_source(None, Path(sys.argv[1]), TimeLimits()) as nvml:
    meter = Meter(nvml(), Path("/grants"))
    meter.want([sys.argv[2]])
    meter.start()
    assert select.select([meter.fd], [], [], 30)[0]
    print(meter.tried, meter.trouble)
    meter.close()
"""


def test_the_arbiter_reports_that_it_measures_nothing_and_why(
    fake_driver: Callable[[str], FakeDriver], tmp_path: Path
) -> None:
    driver = fake_driver(GPUS)
    uuid = driver.status()[0].uuid
    done = run(driver, METER, older(driver, tmp_path, *LISTS), uuid)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == f"True processes of GPU {uuid}: {too_old('580.65.06')}"
    assert "Traceback" not in done.stdout + done.stderr


PLUGIN = """
import asyncio, sys
from pathlib import Path
from deviceplugin.gpus import node_gpus
from deviceplugin.metrics import Metrics
from deviceplugin.gpus.offer import Offer
from nvml.supervisor import NvmlSupervisor
from vgpu.api.names import DEFAULT

async def until_it_waits():
    waits = asyncio.Event()
    pause = asyncio.sleep

    async def sleep(seconds):
        waits.set()
        await pause(seconds)

    async def nothing(_):
        pass

    node_gpus.asyncio.sleep = sleep
    supervisor = NvmlSupervisor(Path(sys.argv[1]))
    supervisor.start()
    supervisor.await_open(60)
    follower = node_gpus.NodeGpus(
        Offer(DEFAULT, 1024), Metrics(), supervisor, access="cdi", unit_mib=1024, health_s=5.0, probe_s=60.0,
        on_inventory=nothing, try_out=nothing,
    )
    running = asyncio.create_task(follower.run())
    await asyncio.wait([running, asyncio.create_task(waits.wait())], timeout=30, return_when=asyncio.FIRST_COMPLETED)
    print("ended" if running.done() else follower.failing)
    running.cancel()
    supervisor.close()

asyncio.run(until_it_waits())
"""


def test_the_plugin_goes_on_and_reports_why_it_offers_nothing(
    fake_driver: Callable[[str], FakeDriver], tmp_path: Path
) -> None:
    driver = fake_driver(GPUS)
    done = run(driver, PLUGIN, older(driver, tmp_path, "nvmlDeviceGetMigDeviceHandleByIndex"))
    uuid = driver.status()[0].uuid
    assert done.stdout.splitlines()[-1] == f"MIG instance 0 of GPU {uuid}: {too_old('580.65.06')}", done.stderr


TANGRAMCTL = """
import sys
from pathlib import Path
from tangramctl import gpus
from tangramctl.__main__ import main

gpus.REAL_DRIVER = Path(sys.argv.pop(1))
main()
"""


@pytest.mark.parametrize("missing", ["nvmlDeviceGetComputeRunningProcesses_v3", "nvmlDeviceGetCount_v2"])
def test_tangramctl_ends_with_the_code_for_no_gpu_and_one_sentence(
    fake_driver: Callable[[str], FakeDriver], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    driver = fake_driver("gpu t4\n")
    monkeypatch.setenv("TANGRAMCTL_STATE", str(driver.folder / "s"))  # short, as sockets lie below it
    monkeypatch.setenv("TANGRAMCTL_LIBRARY", str(driver.libnvml))  # is there; nothing is started that would load it
    root = older(driver, tmp_path / "root", missing)
    done = run(driver, TANGRAMCTL, root, "run", "--gpu-mem", "1Gi", "--", "true")
    assert done.returncode == 69, done.stderr
    assert too_old("580.65.06") in " ".join(done.stderr.split())
    assert "Traceback" not in done.stderr


def test_a_function_that_is_missing_has_nvmls_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nv, "nvmlSystemGetDriverVersion", lambda: "470.57.02")
    for missing in (nv.NVMLError_FunctionNotFound(), nv.NVMLLibraryMismatchError("newer form")):
        with pytest.raises(NvmlError) as caught, naming("GPU 0"):
            raise missing
        assert (caught.value.code, str(caught.value)) == (13, f"GPU 0: {too_old('470.57.02')}")

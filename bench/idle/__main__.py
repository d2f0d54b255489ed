"""How much processor time a node's device plugin, arbiter and NVML child take together, with 50 containers connected.

    uv run python -m bench.idle [--seconds 30] [--repeat 3] [--containers 50] [--csv bench/idle/idle.csv]

The real programs on the fake driver (8 x H200), a kubelet and an API server, as tests/integration/deviceplugin has them. Each container is
admitted and started by that kubelet, and has one process with the library and a context. Rows: no container works; and one container on each GPU
works (kernels of 20 ms, one at a time) under a limit of 10 percent of compute, as all others have.

Not counted: the arbiter's supervisor and its spare, which sleep. There are no mounts here, so a process is known by its environment
(`--grants-in-environment`), and the folder of its socket is a link. The figure is processor time, which grows little with the machine's load.
"""

from __future__ import annotations

import argparse
import asyncio
import csv
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager
from pathlib import Path

from bench.process import cpu_s
from tests.builders import PodBuilder, pod
from tests.built import REPOSITORY, fake_build, shim_build
from tests.fake import FakeDriver, start_fake_driver
from tests.integration.deviceplugin.harness import Node, node
from tests.integration.gputime.conftest import Program
from vgpu.api.codec import inventory_from_json
from vgpu.api.grant import AssignedGpu
from vgpu.api.inventory import Inventory
from vgpu.protocol.status import decode_status

GPUS = 8
UNITS, CORE = 8, 10
SETTLE_S = 65.0
"""After the last start, before anything is counted. For a minute the plugin looks for the mount of a container that starts, and here it finds none."""
KERNEL_US = 20_000
PARTS = ("plugin", "arbiter", "nvml")


def share(name: str, on: Inventory, gpu: int) -> PodBuilder:
    """A pod of one container with 8 units and 10 percent of a GPU."""
    assigned = AssignedGpu(on.gpus[gpu].uuid, gpu, UNITS * 1024, CORE)
    return pod(name).asking(mib=UNITS * 1024, core=CORE).on("n1").assigned(assigned)


async def container(made: Node, driver: FakeDriver, number: int) -> Program:
    """Admitted, started, and with a process that has a context."""
    assert made.api.inventory
    has, name = inventory_from_json(made.api.inventory), f"c{number}"
    one = share(name, has, number % GPUS)
    made.api.put(one.plain())
    await made.kubelet.admit(one.plain())
    await made.kubelet.start_container(name, "main")
    made.api.put(one.with_phase("Running").plain())
    folder = made.grant_folder(name)
    (folder / "socket").rmdir()
    (folder / "socket").symlink_to(made.state / "sockets" / folder.name)
    env = driver.env(
        LD_PRELOAD=f"{shim_build() / 'libtangram.so'}:{fake_build() / 'libfake-kernel.so'}",
        TANGRAM_GRANT=str(folder / "grant"),
        CUDA_VISIBLE_DEVICES=has.gpus[number % GPUS].uuid,
    )
    return await asyncio.to_thread(Program, env, folder.name)


@contextmanager
def arbiter(made: Node, driver: FakeDriver) -> Iterator[int]:
    """Its pid."""
    command = [
        sys.executable, "-m", "arbiter", "--grants-dir", str(made.state / "grants"), "--sockets-dir",
        str(made.state / "sockets"), "--status-socket", str(made.state / "arbiter/status.sock"), "--nvml-socket",
        str(made.state / "plugin/nvml.sock"), "--trials-file", str(made.state / "plugin/trials.json"),
        "--metrics-host", "127.0.0.1", "--metrics-port", "0", "--grants-in-environment", "true", "--log-level", "warning",
    ]  # fmt: skip
    env = driver.env(LD_PRELOAD=str(fake_build() / "libfake-kernel.so"))
    process = subprocess.Popen(command, cwd=REPOSITORY, env=env)
    try:
        yield process.pid
    finally:
        process.terminate()
        process.wait()


def nvml_child(plugin: int) -> int:
    """The one child of the plugin."""
    (pid,) = Path(f"/proc/{plugin}/task/{plugin}/children").read_text().split() or _children(plugin)
    return int(pid)


def _children(pid: int) -> list[str]:
    """Started by any thread."""
    found = [one.read_text().split() for one in Path(f"/proc/{pid}/task").glob("*/children")]
    return [one for part in found for one in part]


async def connected(made: Node) -> int:
    """Processes that the arbiter has."""
    reader, writer = await asyncio.open_unix_connection(str(made.state / "arbiter/status.sock"))
    document = await reader.read()
    writer.close()
    return sum(len(one.processes) for one in decode_status(document).containers)


async def shares_of(pids: Sequence[int], seconds: float) -> list[float]:
    """Percent of a core that each takes."""
    before, at_s = [cpu_s(pid) for pid in pids], time.monotonic()
    await asyncio.sleep(seconds)
    passed_s = time.monotonic() - at_s
    return [100 * (cpu_s(pid) - had) / passed_s for pid, had in zip(pids, before, strict=True)]


async def measure(arguments: argparse.Namespace, folder: Path) -> list[tuple[str, int, list[float]]]:
    """(what, connected processes, percent of a core of each part), for each repetition."""
    driver = start_fake_driver("gpu h200\n" * GPUS, folder)
    rows: list[tuple[str, int, list[float]]] = []
    async with AsyncExitStack() as stack:
        stack.callback(driver.stop)
        made = await stack.enter_async_context(node(driver, folder / "node", access="nvidia"))
        await made.start_plugin("--log-level", "warning", "--health-s", "5")
        await made.ready()
        assert made.process
        watched = [made.process.pid, stack.enter_context(arbiter(made, driver)), nvml_child(made.process.pid)]
        async with asyncio.timeout(60):
            while not (made.state / "arbiter/status.sock").exists():  # noqa: ASYNC110 (another process makes it)
                await asyncio.sleep(0.1)
        programs: list[Program] = []
        for number in range(arguments.containers):
            programs.append(await container(made, driver, number))
            stack.callback(programs[-1].end)
        await asyncio.sleep(SETTLE_S)
        for _ in range(arguments.repeat):
            rows.append(("idle", await connected(made), await shares_of(watched, arguments.seconds)))  # noqa: PERF401 (it awaits)
        for _ in range(arguments.repeat):
            until_s = time.monotonic() + arguments.seconds + 2
            work = f"all((launch({KERNEL_US}), wait(), time.monotonic() < {until_s})[-1] for _ in range(10**9))"
            for program in programs[:GPUS]:
                program.start(work)
            await asyncio.sleep(1)
            rows.append(("8 GPUs work", await connected(made), await shares_of(watched, arguments.seconds)))
            for program in programs[:GPUS]:
                await asyncio.to_thread(program.finish)
    return rows


def main() -> None:
    """Measure, print, write the CSV."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=30)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--containers", type=int, default=50)
    parser.add_argument("--csv", type=Path, default=Path(__file__).with_name("idle.csv"))
    arguments = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="idle-"))
    try:
        rows = asyncio.run(measure(arguments, folder))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    machine = f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, {platform.machine()}"
    with arguments.csv.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(
            ["what", "connected", "seconds", *(f"{part}_percent" for part in PARTS), "sum_percent", "machine"]
        )
        for what, count, percents in rows:
            reported = [f"{percent:.2f}" for percent in (*percents, sum(percents))]
            writer.writerow([what, count, f"{arguments.seconds:g}", *reported, machine])
    print(arguments.csv.read_text(), end="")


if __name__ == "__main__":
    main()

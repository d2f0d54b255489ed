"""How long admission of a container takes on a node: GetPreferredAllocation, Allocate and PreStartContainer, over gRPC.

    uv run python -m bench.deviceplugin [--rounds 300] [--csv bench/deviceplugin/admission.csv]

A real plugin process on the fake driver (8 x H200: 1,128 memory IDs); the kubelet's side of the calls in Go, with the kubelet's own
messages and gRPC (bench/deviceplugin/kubelet); an API server over HTTP whose watch shows each pod before it is admitted. A third of the
node is in use. Each round is one container with gpu-mem and gpu-core: two preferred, two Allocate, one PreStart call; the figure is the
time that the kubelet waits for answers. Two costs of the machine itself are measured beside it, in the same minutes: as many empty calls, and the
fsync of a small new file, which each container needs once. The last row is how many times their sum the figure is. The arbiter is a listening socket, there before PreStart as the arbiter's own is (it takes
milliseconds in a process of its own).

What an admission causes beside its answers (the next grant directory, a look at all processes of the machine after a pod has gone) is in the
processor time of a round and not in its figures: the plugin does it between the calls (`deviceplugin/calls_in_progress.py`). Rounds follow each other
faster than admissions of a node do. With TMPDIR on a tmpfs the figures are those of the plugin without the disk.

The plugin's resident memory is that with a kubeconfig, which takes some 20 MiB to read; in a pod there is none.
"""

from __future__ import annotations

import argparse
import asyncio
import csv
import gc
import json
import os
import platform
import shutil
import statistics
import subprocess
import tempfile
import time
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.process import cpu_s, memory_mib
from hack.cluster.build import SHARED_FLAGS
from hack.cluster.layout import cache_folder
from hack.cluster.toolchain import find_go
from tests.builders import PodBuilder, pod
from tests.fake import start_fake_driver
from tests.integration.deviceplugin.harness import PluginNode, plugin_node
from vgpu.api.codec import inventory_from_json
from vgpu.api.grant import AssignedGpu
from vgpu.api.inventory import Inventory
from vgpu.api.names import DEFAULT

GPUS = "gpu h200 memory_mib=144384\n" * 8
"""141 GiB each, as the GPU is sold; NVML of a real one shows 143,771 MiB, which is 140 units and so 1,120 IDs."""
UNITS, CORE = 8, 5
CALLS = 5
"""Of a round."""
RECORD_BYTES = 1024
WATCH_S = 0.02
"""The watch brings a pod within this; the kubelet's own watch takes as long."""
SOURCE = Path(__file__).with_name("kubelet")


@dataclass
class Kubelet:
    """The Go program, called line by line."""

    folder: Path
    process: asyncio.subprocess.Process

    @classmethod
    async def start(cls, program: Path, folder: Path) -> Kubelet:
        pipe = asyncio.subprocess.PIPE
        return cls(folder, await asyncio.create_subprocess_exec(program, folder, stdin=pipe, stdout=pipe))

    async def does(self, what: str, pod: str = "", *, times: int = 0, **limits: int) -> dict[str, Any]:
        """Its answer. Raises RuntimeError with what the plugin refused."""
        assert self.process.stdin
        assert self.process.stdout
        named = {getattr(DEFAULT, name): count for name, count in limits.items()}
        request = {"do": what, "pod": pod, "container": "main", "limits": named, "times": times}
        self.process.stdin.write(json.dumps(request).encode() + b"\n")
        answer: dict[str, Any] = json.loads(await self.process.stdout.readline())
        if "error" in answer:
            raise RuntimeError(f"kubelet: {what} {pod}: {answer['error']}")
        return answer

    async def stop(self) -> None:
        self.process.kill()
        await self.process.wait()


def share(name: str, on: Inventory, gpu: int) -> PodBuilder:
    """A pod of one container with 8 units and 5 percent of a GPU."""
    assigned = AssignedGpu(on.gpus[gpu].uuid, gpu, UNITS * 1024, CORE)
    return pod(name).asking(mib=UNITS * 1024, core=CORE).on("n1").assigned(assigned)


async def one_round(made: PluginNode, kubelet: Kubelet, one: PodBuilder) -> tuple[float, float]:
    """Seconds of admission (preferred, Allocate) and of PreStart."""
    made.api.put(one.plain())
    await asyncio.sleep(WATCH_S)
    admitted = await kubelet.does("admit", one.name, gpu_mem=UNITS, gpu_core=CORE)
    (folder,) = [path for path in map(Path, admitted["mounts"]) if path.parent.name == "grants"]
    made.arbiter_listens_in(folder)
    started = await kubelet.does("start", one.name)
    return admitted["took_us"] / 1e6, started["took_us"] / 1e6


async def measure(
    rounds: int, folder: Path, program: Path
) -> tuple[int, list[tuple[float, float]], list[float], list[float], float, float]:
    """(memory IDs, seconds of each round, of as many empty calls, of one fsync, MiB of resident memory afterwards, ms of the plugin's CPU time a round)."""
    driver = start_fake_driver(GPUS, folder)
    async with AsyncExitStack() as stack:
        stack.callback(driver.stop)
        kubelet = await Kubelet.start(program, folder / "node" / "kubelet")
        stack.push_async_callback(kubelet.stop)
        made = await stack.enter_async_context(plugin_node(driver, folder / "node", kubelet.folder, access="nvidia"))
        await made.start_plugin("--log-level", "warning", "--health-s", "5")
        offered = await kubelet.does("ready", gpu_mem=1, gpu_core=1)
        await made.published()
        assert made.process
        assert made.api.inventory
        has = inventory_from_json(made.api.inventory)
        for number in range(48):
            resident = share(f"resident-{number}", has, number % 8)
            await one_round(made, kubelet, resident)
            made.api.put(resident.with_phase("Running").plain())
        gc.freeze()  # collections of this process are not the plugin's time
        taken, disk, cpu_before_s = [], [], cpu_s(made.process.pid)
        for number in range(rounds):
            one = share(f"p{number}", has, number % 8)
            taken.append(await one_round(made, kubelet, one))
            await kubelet.does("remove", one.name)
            made.api.remove(one.plain())
            disk.append(await asyncio.to_thread(fsync_s, made.state / f"fsync-{number}"))
        cpu_ms = 1000 * (cpu_s(made.process.pid) - cpu_before_s) / rounds
        empty = [(await kubelet.does("options", times=CALLS, gpu_mem=1))["took_us"] / 1e6 for _ in range(rounds)]
        return offered["devices"][DEFAULT.gpu_mem], taken, empty, disk, memory_mib(made.process.pid), cpu_ms


def fsync_s(path: Path) -> float:
    """How long the disk takes for a new file of the size of an allocation's record."""
    with path.open("wb") as file:
        file.write(bytes(RECORD_BYTES))
        file.flush()
        began_s = time.perf_counter()
        os.fsync(file.fileno())
        took_s = time.perf_counter() - began_s
    path.unlink()
    return took_s


def build_kubelet() -> Path:
    """The Go program. What it shares with the kubelet of the local cluster is compiled once for both."""
    program = cache_folder() / "bench" / "kubelet"
    subprocess.run([find_go(cache_folder()), "build", *SHARED_FLAGS, "-o", program, "."], cwd=SOURCE, check=True)
    return program


def main() -> None:
    """Measure, print, write the CSV."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=300)
    parser.add_argument("--csv", type=Path, default=Path(__file__).with_name("admission.csv"))
    arguments = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="bench-"))
    try:
        ids, taken, empty, disk, rss_mib, cpu_ms = asyncio.run(measure(arguments.rounds, folder, build_kubelet()))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    rows, cuts_of = [], {}
    for what, seconds in (
        ("preferred + allocate", [a for a, _ in taken]),
        ("prestart", [p for _, p in taken]),
        ("sum", [a + p for a, p in taken]),
        ("as many empty calls", empty),
        ("one fsync", disk),
    ):
        cuts = statistics.quantiles(seconds, n=100)
        cuts_of[what] = cuts[49], cuts[98], max(seconds)
        reported = (f"{1000 * s:.2f}" for s in cuts_of[what])
        rows.append([what, ids, len(seconds), *reported, f"{rss_mib:.0f}", f"{cpu_ms:.1f}"])
    machine_s = zip(cuts_of["as many empty calls"], cuts_of["one fsync"], strict=True)
    times = (f"{s / (calls + fsync):.2f}" for s, (calls, fsync) in zip(cuts_of["sum"], machine_s, strict=True))
    rows.append(
        ["sum / (empty calls + fsync), a ratio", ids, arguments.rounds, *times, f"{rss_mib:.0f}", f"{cpu_ms:.1f}"]
    )
    head = [
        "step",
        "memory_ids",
        "rounds",
        "p50_ms",
        "p99_ms",
        "max_ms",
        "plugin_rss_mib",
        "plugin_cpu_ms_a_round",
        "machine",
    ]
    machine = f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, {platform.machine()}"
    with arguments.csv.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(head)
        writer.writerows([*row, machine] for row in rows)
    print(arguments.csv.read_text(), end="")


if __name__ == "__main__":
    main()

"""How long admission of a container takes on a node: GetPreferredAllocation, Allocate and PreStartContainer, over gRPC.

    uv run python -m bench.deviceplugin [--rounds 300] [--csv bench/deviceplugin/admission.csv]

A real plugin process on the fake driver (8 x H200: 1,128 memory IDs), a kubelet made of real gRPC servers in this one, an API server
over HTTP whose watch shows each pod before it is admitted. A third of the node is in use. Each round is one container with gpu-mem
and gpu-core: two preferred, two Allocate, one PreStart call; the figure is the time that the kubelet waits for answers. The arbiter
is a listening socket, there before PreStart as the arbiter's own is (it takes milliseconds in a process of its own).

The plugin's resident memory is that with a kubeconfig, which takes some 20 MiB to read; in a pod there is none.
"""

from __future__ import annotations

import argparse
import asyncio
import csv
import gc
import os
import platform
import shutil
import statistics
import tempfile
from pathlib import Path

from tests.builders import PodBuilder, pod
from tests.fake import start_fake_driver
from tests.integration.deviceplugin.harness import Node, node
from vgpu.codec import inventory_from_json
from vgpu.grant import Slice
from vgpu.inventory import Inventory
from vgpu.names import DEFAULT

CARDS = "card h200 memory_mib=144384\n" * 8
"""141 GiB each, as the card is sold; NVML of a real one tells 143,771 MiB, which is 140 units and so 1,120 IDs."""
UNITS, CORE = 8, 5
CALLS = 5
"""Of a round."""
WATCH_S = 0.02
"""The watch brings a pod within this; the kubelet's own watch takes as long."""


def share(name: str, on: Inventory, card: int) -> PodBuilder:
    """A pod of one container with 8 units and 5 percent of a card."""
    piece = Slice(on.cards[card].uuid, card, UNITS * 1024, CORE)
    return pod(name).asking(mib=UNITS * 1024, core=CORE).on("n1").assigned(piece)


async def one_round(made: Node, one: PodBuilder) -> tuple[float, float]:
    """Seconds of admission (preferred, Allocate) and of PreStart."""
    made.api.put(one.plain())
    await asyncio.sleep(WATCH_S)
    made.kubelet.waited_s = 0.0
    await made.kubelet.admit(one.plain())
    admitted, made.kubelet.waited_s = made.kubelet.waited_s, 0.0
    made.arbiter_listens(one.name)
    await made.kubelet.start_container(one.name, "main")
    return admitted, made.kubelet.waited_s


async def measure(rounds: int, folder: Path) -> tuple[int, list[tuple[float, float]], list[float], float, float]:
    """(memory IDs, seconds of each round, seconds of as many empty calls, MiB of resident memory afterwards, ms of the plugin's CPU time a round)."""
    driver = start_fake_driver(CARDS, folder)
    try:
        async with node(driver, folder / "node", access="nvidia") as made:
            await made.start_plugin("--log-level", "warning", "--health-s", "5")
            await made.ready()
            assert made.api.inventory
            has = inventory_from_json(made.api.inventory)
            for number in range(48):
                resident = share(f"resident-{number}", has, number % 8)
                await one_round(made, resident)
                made.api.put(resident.with_phase("Running").plain())
            assert made.process
            gc.freeze()  # collections of this process are not the plugin's time
            taken, cpu_before_s = [], cpu_s(made.process.pid)
            for number in range(rounds):
                one = share(f"p{number}", has, number % 8)
                taken.append(await one_round(made, one))
                made.kubelet.remove("default", one.name)
                made.api.remove(one.plain())
            cpu_ms = 1000 * (cpu_s(made.process.pid) - cpu_before_s) / rounds
            empty = await empty_calls(made, rounds)
            return len(made.kubelet.healthy(DEFAULT.gpu_mem)), taken, empty, resident_mib(made.process.pid), cpu_ms
    finally:
        driver.stop()


async def empty_calls(made: Node, rounds: int) -> list[float]:
    """Seconds of five calls that decide nothing, as many as a round has: what gRPC itself costs here."""
    made.kubelet.waited_s, taken = 0.0, []
    for _ in range(rounds):
        for _ in range(CALLS):
            await made.kubelet.ask_options(DEFAULT.gpu_mem)
        taken.append(made.kubelet.waited_s)
        made.kubelet.waited_s = 0.0
    return taken


def resident_mib(pid: int) -> float:
    """Resident memory of a process."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) / 1024
    raise AssertionError(f"/proc/{pid}/status names no VmRSS")


def cpu_s(pid: int) -> float:
    """CPU time of a process so far. Does not grow with the machine's load, as waiting does."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def main() -> None:
    """Measure, print, write the CSV."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=300)
    parser.add_argument("--csv", type=Path, default=Path(__file__).with_name("admission.csv"))
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="bench-"))
    try:
        ids, taken, empty, rss_mib, cpu_ms = asyncio.run(measure(options.rounds, folder))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    rows = []
    for what, seconds in (
        ("preferred + allocate", [a for a, _ in taken]),
        ("prestart", [p for _, p in taken]),
        ("sum", [a + p for a, p in taken]),
        ("as many empty calls", empty),
    ):
        cuts = statistics.quantiles(seconds, n=100)
        rows.append(
            [
                what,
                ids,
                len(seconds),
                *(f"{1000 * s:.2f}" for s in (cuts[49], cuts[98], max(seconds))),
                f"{rss_mib:.0f}",
                f"{cpu_ms:.1f}",
            ]
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
    with options.csv.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(head)
        writer.writerows([*row, machine] for row in rows)
    print(options.csv.read_text(), end="")


if __name__ == "__main__":
    main()

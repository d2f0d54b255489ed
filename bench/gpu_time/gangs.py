"""A container with two GPUs whose kernels wait for each other (NCCL's all-reduce), beside neighbours on each GPU: does it advance, at what price, with right results?

    python3 bench/gpu_time/gangs.py --out FOLDER [--steps 2000] [--repeats 3] [--gpus 2] [--fake]

Each case is a row of FOLDER/gangs.csv for each repeat: the time of a step; the part of the container's own GPU time that its steps do not need when it is alone (switches, skew and a
lower clock together); wrong results; the neighbours' requests. A case in which the container does not advance for `WITHIN_S` is a row `not run`, and the exit status is 1.

Needs as many GPUs, gcc and a Python with PyTorch (TANGRAM_TEST_PYTHON); TANGRAM_LIBRARY names a libtangram.so built elsewhere.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))
from bench.gpu_time.latency import KERNEL_US, LAUNCHES, LONG_US, PERIOD_US
from bench.gpu_time.node import HERE, MIB, PYTHON, Node, quantile, request
from bench.gpu_time.results import Results
from tests.gpu.kit.lines import Lines
from tests.gpu.kit.machine import machine
from vgpu.api.codec import grant_to_text
from vgpu.api.grant import Grant, GrantGpu

PART = "gangs"
WITHIN_S = 240.0
"""For all steps of a case. Guessed: ten times what they take alone, and the slices against starvation."""
CELLS_BYTES = 4 << 20
"""Of the file in which the fake driver's kernels wait for each other."""
REQUESTS = 200


@dataclass(frozen=True)
class Case:
    """Who is beside the container."""

    name: str
    neighbours: tuple[str, ...] = ()
    """Service class of a container that always has work, by GPU; empty = none there."""
    urgent: bool = False
    """Latency-critical requests on the first GPU."""


CASES = (
    Case("alone"),
    Case("best-effort on each GPU", ("best-effort", "best-effort")),
    Case("equals on each GPU", ("standard", "standard")),
    Case("requests on the first, best-effort on the second", ("", "best-effort"), urgent=True),
)


class Gpus:
    """The node, and programs on one of its GPUs or on all."""

    def __init__(self, node: Node, size: int) -> None:
        self.node, self.size = node, size
        self.uuids = node.machine.uuids
        self.per_us: float = 0.0
        self._made = 0

    def gang(self, processes: int, *, held: bool) -> tuple[str, list[Lines]]:
        """The container's key, and its processes, which have begun."""
        self._made += 1
        key, store = f"gang-{self._made}", self.node.machine.folder / f"store-{self._made}"
        if self.node.machine.fake:
            with store.open("wb") as file:
                file.truncate(CELLS_BYTES)
        if held:
            self._grant(key, "standard", self.uuids)
        made = [
            self.node.machine.lines(
                [PYTHON, str(HERE / "gang_work.py")],
                key if held else "",
                GANG_GPUS=",".join(map(str, range(self.size)[rank::processes])),
                GANG_SIZE=str(self.size),
                GANG_STORE=str(store),
                GANG_CELLS=str(store),
                CUDA_VISIBLE_DEVICES=",".join(self.uuids),
            )
            for rank in range(processes)
        ]
        for one in made:
            one.receive(WITHIN_S)
        if held:
            self.node.wait_for_turns(key)
        return key, made

    def load(self, service_class: str, gpu: int) -> Lines:
        """A program on one GPU, in a container of its own."""
        key = f"{service_class}-{gpu}"
        self._grant(key, service_class, (self.uuids[gpu],))
        lines = self.node.load(key, CUDA_VISIBLE_DEVICES=self.uuids[gpu])
        self.per_us = self.per_us or float(request(lines, "calibrate")["per_us"])
        return lines

    def _grant(self, key: str, service_class: str, uuids: tuple[str, ...]) -> None:
        folder = self.node.machine.folder / "grants" / key
        folder.mkdir(exist_ok=True)
        shares = tuple(GrantGpu(uuid, MIB) for uuid in uuids)
        (folder / ".new").write_text(grant_to_text(Grant("bench", key, f"uid-{key}", "main", shares, service_class)))
        (folder / ".new").chmod(0o444)
        (folder / ".new").rename(folder / "grant")
        self.node.wait((folder / "arbiter.sock").exists, f"the socket of container {key}")


def steps(gang: list[Lines], count: int) -> list[dict[str, Any]]:
    """Every process makes so many. TimeoutError if they do not end."""
    for one in gang:
        one.send("steps", count)
    return [one.receive(WITHIN_S) for one in gang]


def run(gpus: Gpus, results: Results, case: Case, processes: int, count: int, repeat: int, alone_s: float) -> float:
    """One case, once. Returns the seconds of a step; `alone_s`: those without the library and neighbours, 0 = this is that case."""
    name = f"{processes} process{'es' if processes > 1 else ''}, {case.name}"
    key, gang = gpus.gang(processes, held=bool(alone_s))
    busy = [(gpus.load(of, gpu), gpu) for gpu, of in enumerate(case.neighbours) if of]
    for lines, _ in busy:
        request(lines, "start", LONG_US, gpus.per_us)
    urgent = gpus.load("latency-critical", 0) if case.urgent else None
    if urgent is not None:
        urgent.send("lc", REQUESTS, PERIOD_US, LAUNCHES, KERNEL_US, gpus.per_us, 0)
    before_s = gpus.node.gpu_times()[key].on_s if alone_s else 0.0
    answers = steps(gang, count)
    step_s: float = max(answer["seconds"] for answer in answers) / count
    results.add(PART, name, "a step", "ms", repeat, step_s * 1000)
    results.add(PART, name, "wrong results", "", repeat, sum(answer["wrong"] for answer in answers), "0 is right")
    if alone_s:
        had_s = gpus.node.gpu_times()[key].on_s - before_s
        results.add(PART, name, "own GPU time beyond its steps alone", "%", repeat, 100 * (1 - alone_s * count / had_s))
    if urgent is not None:
        results.add(PART, name, "requests, p99", "us", repeat, quantile(urgent.receive(WITHIN_S)["us"], 0.99))
    gpus.node.machine.end_containers()
    return step_s


@contextmanager
def node_with(gpus: int, fake: bool | None) -> Iterator[Node]:
    """Ends everything that it started."""
    with machine(fake, gpus=gpus) as here:
        made = Node(here)
        try:
            yield made
        finally:
            here.end_containers()
            made.stop_arbiter()


def main() -> int:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for the results")
    parser.add_argument("--steps", type=int, default=2000, help="of each case")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--gpus", type=int, default=2)
    parser.add_argument("--fake", action="store_true", default=None, help="on the fake driver, though there are GPUs")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    failed = False
    with node_with(arguments.gpus, arguments.fake) as node:
        if len(node.machine.uuids) < arguments.gpus:
            parser.error(f"--gpus {arguments.gpus}: this machine has {len(node.machine.uuids)}")
        results, gpus = Results(arguments.out / "gangs.csv", node.machine.describe()), Gpus(node, arguments.gpus)
        node.start_arbiter()
        for repeat in range(arguments.repeats):
            for processes in (1, arguments.gpus):
                alone_s = 0.0
                for case in (Case("alone, without the library"), *CASES):
                    try:
                        step_s = run(gpus, results, case, processes, arguments.steps, repeat, alone_s)
                        alone_s = alone_s or step_s
                    except (TimeoutError, RuntimeError, OSError) as error:
                        failed = True
                        results.not_run(PART, f"{processes}, {case.name}", f"{type(error).__name__}: {error}")
                        node.machine.end_containers()
                    if not alone_s:
                        break  # there is nothing to compare with
        results.sum_up(PART)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())

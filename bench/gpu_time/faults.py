"""Kill, stop and restart the arbiter, a latency-critical and a best-effort process at every step: every living process goes on, and
every sum that a suspended kernel made is right.

The same matrix as tests/integration/gputime/test_fault_matrix.py, with real kernels. Each combination comes once, in an order that a
seed decides, and some twice. What went wrong is a row, and the part fails.
"""

from __future__ import annotations

import itertools
import random
import signal
import time
from dataclasses import dataclass, field
from typing import Final

from bench.gpu_time.latency import free_lc_rate
from bench.gpu_time.node import Node
from bench.gpu_time.results import Results
from tests.gpu.kit.machine import Lines

ROUNDS: Final = 50
SEED: Final = 1
KERNEL_US: Final = 20_000
CHECK_S, AFTERWARDS_S = 0.4, 0.05
LIMIT_S: Final = 10
"""In which every process has to have gone on. A suspend lasts a second at most; the rest is for a process's own start."""
CLASSES: Final = {"be": "best-effort", "lc": "latency-critical"}
REQUESTS: Final = {
    "in peace": None,
    "as work arrives": (1, 1000, 1, 2000, 0),
    "while it is stopped": (1, 1000, 1, 50_000, 0),
    "as work ends": (1, 1000, 1, 1000, 0),
    "as work is announced": (1, 10_000, 1, 500, 3000),
}
"""Step -> the latency-critical one's request, as load.c's `lc` takes it less PER_US."""
FAULTS: Final = (signal.SIGKILL, signal.SIGSTOP, signal.SIGTERM)
VICTIMS: Final = ("arbiter", "be", "lc")


@dataclass
class Stage:
    """A node with one container of each class, of which any may be gone or stopped."""

    node: Node
    per_us: int
    chance: random.Random
    containers: dict[str, Lines] = field(default_factory=dict)
    kernels: int = 0
    wrong: int = 0

    def settle(self) -> None:
        """All processes run and answer."""
        if not self.node.arbiter_lives():
            self.node.start_arbiter()
        for name in CLASSES:
            if name not in self.containers:
                self.containers[name] = self.node.load(name)
        self.node.wait_for_turns(*CLASSES)

    def count(self, name: str) -> None:
        """What a container's check found."""
        found = self.containers[name].receive(LIMIT_S)
        self.kernels += found["kernels"]
        self.wrong += found["wrong"]

    def round(self, number: signal.Signals, victim: str, step: str) -> float:
        """One fault. When all processes run again: seconds until both had results."""
        self.containers["be"].send("check", CHECK_S, KERNEL_US, self.per_us)
        requested = self._begin(step)
        time.sleep(self.chance.random() * 0.003)
        self._fault(number, victim)
        if requested and "lc" in self.containers:
            self.containers["lc"].receive(LIMIT_S)
        if "be" in self.containers:
            self.count("be")
        self.settle()
        began = time.monotonic()
        for name in CLASSES:
            self.containers[name].send("check", AFTERWARDS_S, 500, self.per_us)
        for name in CLASSES:
            self.count(name)
        return time.monotonic() - began

    def _begin(self, step: str) -> bool:
        """Is an answer of the latency-critical one owed?"""
        request, lc = REQUESTS[step], self.containers["lc"]
        if request is None:
            time.sleep(self.chance.random() * 0.02)
            return False
        lc.send("lc", *request[:-1], self.per_us, request[-1])
        if step == "while it is stopped":
            self.node.wait(lambda: not self.node.gpu_times()["be"].on, "the suspend of the best-effort one", LIMIT_S)
        if step == "as work ends":
            lc.receive(LIMIT_S)
            time.sleep(self.chance.random() * 0.004)
            return False
        return True

    def _fault(self, number: signal.Signals, victim: str) -> None:
        process = self.node.arbiter if victim == "arbiter" else self.containers[victim].process
        process.send_signal(number)
        if number == signal.SIGSTOP:
            time.sleep(self.chance.choice([0.0, 0.05] if victim != "arbiter" else [0.0, 0.7]))
            process.send_signal(signal.SIGCONT)
        else:
            process.wait(LIMIT_S)
            if victim != "arbiter":
                del self.containers[victim]
                self.node.machine.end_containers(keep=tuple(self.containers.values()))


def run(node: Node, results: Results, seconds: float) -> None:
    """ROUNDS of them, or as many as there is time for."""
    end = time.monotonic() + seconds
    node.start_arbiter()
    for key, service_class in CLASSES.items():
        node.grant(key, service_class)
    plain = node.load()
    stage = Stage(node, free_lc_rate(plain), random.Random(SEED))
    node.machine.end_containers()
    stage.settle()
    rounds = 0
    for number, victim, step in _order(stage.chance):
        if time.monotonic() > end:
            break
        case = f"{number.name} to {victim} {step}"
        results.add(
            "faults", case, "seconds until everybody had right results", "s", rounds, stage.round(number, victim, step)
        )
        rounds += 1
    note = "the fake driver computes nothing" if node.machine.fake else ""
    seen = {"rounds": rounds, "kernels checked": stage.kernels, "kernels with a wrong sum": stage.wrong}
    for figure, value in seen.items():
        results.add("faults", "all", figure, "", "all", value, note)
    if stage.wrong and not node.machine.fake:
        raise AssertionError(f"{stage.wrong} of {stage.kernels} kernels with a wrong sum")


def _order(chance: random.Random) -> list[tuple[signal.Signals, str, str]]:
    combinations = list(itertools.product(FAULTS, VICTIMS, REQUESTS))
    chance.shuffle(combinations)
    return [*combinations, *chance.choices(combinations, k=ROUNDS - len(combinations))]

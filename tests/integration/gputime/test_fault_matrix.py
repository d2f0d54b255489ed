"""Kill, stop, restart: the arbiter, a latency-critical and a best-effort process, at every step, in an order that a seed decides.

After each round every living process must run again, and at the end no enable is owed. 100 rounds are always run; `make faults` runs
1,000, or ROUNDS=... in the order of SEED=... (here TANGRAM_FAULT_ROUNDS and TANGRAM_FAULT_SEED).
"""

from __future__ import annotations

import os
import random
import re
import signal
import time
from collections.abc import Callable

import pytest

from tests.integration.gputime.conftest import Node, Program, until
from tests.signals import send_signal

ROUNDS = int(os.environ.get("TANGRAM_FAULT_ROUNDS", "100"))
SEED = int(os.environ.get("TANGRAM_FAULT_SEED", "1"))
LC, BE = "latency-critical", "best-effort"
EXPECTED = ("is not there", "is no channel of the subdevice")
"""Misuses that a process's death explains: its handles were on their way."""


class Matrix:
    """A node with one of each, of which any may be gone or stopped."""

    def __init__(self, node: Node, chance: random.Random) -> None:
        self.node, self.chance = node, chance
        self.programs: dict[str, Program] = {}
        self.stopped: set[str] = set()
        self.settle()

    def settle(self) -> None:
        """Everybody is here, awake and at work."""
        if self.node.arbiter.poll() is not None:
            (self.node.folder / "status.sock").unlink(missing_ok=True)
            self.node.start_arbiter()
        for name in list(self.stopped):
            self.node.arbiter.send_signal(signal.SIGCONT) if name == "arbiter" else self.programs[name].send(
                signal.SIGCONT
            )
        self.stopped.clear()
        for name, service_class in (("be", BE), ("lc", LC)):
            if name not in self.programs:
                self.programs[name] = self.node.run(name, service_class)
                if name == "be":
                    self.programs[name].do("work_on(20_000)")

    def steps(self) -> dict[str, Callable[[], object]]:
        """Moments at which a fault may come."""
        be, lc = self.programs["be"], self.programs["lc"]

        def urgent(us: int) -> None:
            if "lc" not in self.stopped:
                lc.start(f"launch({us})")
                lc.finish()

        return {
            "in peace": lambda: None,
            "as work arrives": lambda: lc.start("requests(1, 2000, 0.0)"),
            "while it is stopped": lambda: until(lambda: self.node.held(be) or urgent(20_000)),
            "as work ends": lambda: (urgent(1000), time.sleep(self.chance.random() * 0.004)),
            "as work is announced": lambda: lc.start("requests(1, 500, 0.0, hint_us=3000)"),
        }

    def fault(self, victim: str, number: signal.Signals) -> None:
        if victim == "arbiter":
            send_signal(self.node.arbiter.pid, number)
            if number != signal.SIGSTOP:
                self.node.arbiter.wait()
        elif number == signal.SIGSTOP:
            self.programs[victim].send(number)
        else:
            program = self.programs.pop(victim)
            self.node.programs.remove(program)
            program.send(number)
            program.end()
        if number == signal.SIGSTOP:
            self.stopped.add(victim)

    def every_container_runs(self) -> None:
        """Each gets on with its work within what the design promises, and some for a slow machine."""
        be, lc = self.programs["be"], self.programs["lc"]
        ran = self.node.ran_us(be)
        lc.start("launch(500) or wait()")
        lc.finish()
        until(lambda: self.node.ran_us(be) > ran and not self.node.held(be), 5)


@pytest.mark.timeout(120 + 3 * ROUNDS)  # a round takes half a second on a quiet machine
def test_every_container_runs_after_any_process_dies_or_stops(node: Node):
    chance = random.Random(SEED)
    matrix = Matrix(node, chance)
    for round_ in range(ROUNDS):
        step = chance.choice(list(matrix.steps()))
        victim = chance.choice(["arbiter", "arbiter", "be", "lc"])
        number = chance.choice([signal.SIGKILL, signal.SIGSTOP, signal.SIGTERM])
        about = f"seed {SEED}, round {round_}: {number.name} to {victim} {step}"
        try:
            matrix.steps()[step]()
            started = step.startswith("as work") and step != "as work ends"
            time.sleep(chance.random() * 0.003)
            matrix.fault(victim, number)
            if victim == "arbiter" and number == signal.SIGSTOP:
                time.sleep(chance.choice([0.0, 0.7]))
            elif number == signal.SIGSTOP:
                time.sleep(chance.choice([0.0, 0.05]))
            if started and victim == "lc" and number == signal.SIGSTOP:
                matrix.programs["lc"].send(signal.SIGCONT)
            if started and "lc" in matrix.programs:
                matrix.programs["lc"].finish()
            matrix.settle()
            matrix.every_container_runs()
        except AssertionError as error:
            kernel = node.driver.ctl("kernel")
            raise AssertionError(f"{about}: {error}\n{kernel}\n{node.log()[-2000:]}") from error
    for program in matrix.programs.values():
        program.do("stop()")
    until(lambda: not re.search(r"(held|owed)=[1-9]", node.driver.ctl("kernel")), 5)
    misuse = node.misuses()
    assert not misuse or any(expected in misuse for expected in EXPECTED), misuse

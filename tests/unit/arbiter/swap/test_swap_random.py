"""Whatever ends, and whenever: no block is lost, no slot used twice, and in the end every process that lives has its memory."""

from __future__ import annotations

import tempfile
from pathlib import Path

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.unit.arbiter.swap.node_kit import GPU, SimulatedNode, SimulatedProcess, contract
from vgpu.memory.records import NodeAnswer
from vgpu.memory.swap.settings import SwapSettings

NAMES = ("a", "b", "c")
SETTINGS = SwapSettings(quantum_least_s=0.5, overhead_s=0.01, retry_s=0.1, starve_after_s=5.0)
step = st.one_of(
    st.tuples(st.just("step"), st.integers(0, 5)),
    st.tuples(st.just("step"), st.integers(0, 5)),
    st.tuples(st.just("copy"), st.integers(0, 5)),
    st.tuples(st.just("copy"), st.integers(0, 5)),
    st.tuples(st.just("turn"), st.just(0)),
    st.tuples(st.just("turn"), st.just(0)),
    st.tuples(st.just("pass"), st.integers(1, 40)),
    st.tuples(st.just("settle"), st.integers(0, 20)),
    st.tuples(st.just("request"), st.integers(0, 20)),
    st.tuples(st.just("work"), st.integers(0, 5)),
    st.tuples(st.just("run"), st.just(0)),
    st.tuples(st.just("kill"), st.integers(0, 5)),
    st.tuples(st.just("drop"), st.integers(0, 5)),
    st.tuples(st.just("connect"), st.integers(0, 5)),
    st.tuples(st.just("deaf"), st.integers(0, 5)),
    st.tuples(st.just("export"), st.integers(0, 5)),
    st.tuples(st.just("let go"), st.integers(0, 5)),
    st.tuples(st.just("discard"), st.integers(0, 5)),
    st.tuples(st.just("discard"), st.integers(0, 5)),
    st.tuples(st.just("no disk"), st.booleans()),
    st.tuples(st.just("copier"), st.just(0)),
    st.tuples(st.just("spoil"), st.just(0)),
    st.tuples(st.just("arbiter"), st.just(0)),
    st.tuples(st.just("halts"), st.booleans()),
)


class Script:
    """Carries out steps, and then lets everything come to rest."""

    def __init__(self, folder: Path) -> None:
        self.node = SimulatedNode(folder, capacity=12, pool=48, settings=SETTINGS)
        for name, service_class in zip(NAMES, ("standard", "standard", "best-effort"), strict=True):
            self.node.join(name, contract(2, 12, service_class))
            for _ in range(2):
                self.node.process(name)
        self.node.settle(1.0)

    def process(self, number: int) -> SimulatedProcess | None:
        living = list(self.node.processes.values())
        return living[number % len(living)] if living else None

    def do(self, what: str, number: int) -> None:
        node, process = self.node, self.process(number)
        match what:
            case "step" if process is not None:
                process.step()
            case "copy":
                node.copier.step()
            case "turn":
                node.turn()
            case "pass":
                node.now_s += number / 10
            case "settle":
                node.settle(number / 10)
            case "request" if process is not None and process.sock is not None:
                self.request(process, 1 + number % 3)
            case "work":
                node.swaps.working(NAMES[number % 3], number > 2)
            case "run":
                for one in node.processes.values():
                    one.run()
            case "kill" if process is not None:
                node.kill(process)
            case "drop" if process is not None:
                process.drop()
            case "connect" if process is not None:
                process.connect()
            case "deaf" if process is not None:
                process.deaf = not process.deaf
            case "export" if process is not None:
                process.exported = 1
            case "let go" if process is not None:
                process.let_go = 1
            case "discard" if process is not None:
                process.discard(1 + number % 2)
            case "no disk":
                node.disk_full = bool(number)
            case "copier":
                if node.copier.there:
                    node.copier.kill()
                else:
                    node.copier.there = True
            case "spoil":
                node.copier.fail_next = 1
            case "arbiter":
                node.kill_arbiter()
                for name in NAMES:
                    node.use(name)
            case "halts":
                node.blocks.halts = bool(number)

    def request(self, process: SimulatedProcess, grains: int) -> None:
        within = self.node.leased(process.name) // (2 * 2**20) + grains <= 2
        if within or self.node.may_burst(process.name):
            self.node.request(process, grains, wait_s=30.0)

    def rest(self) -> None:
        node = self.node
        node.disk_full = False
        node.copier.there, node.copier.ready, node.blocks.halts, node.copier.fail_next = True, True, True, 0
        for process in node.processes.values():
            process.deaf = False
        node.settle()
        for process in node.processes.values():
            if process.sock is None:
                process.connect()
        for id_ in list(node.requests):
            del node.requests[id_]
            node.swaps.withdraw(id_)
        node.settle(60.0)
        for name in NAMES:
            node.swaps.working(name, True)
        node.settle(60.0)

    def end_some(self) -> None:
        """Until there is room for all the others."""
        node = self.node
        while sum(node.leased(name) for name in NAMES) > node.capacity * 2 * 2**20:
            node.kill(next(iter(node.processes.values())))
        node.settle(200.0)


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(step, max_size=60))
def test_no_block_is_lost_and_all_come_back(steps: list[tuple[str, int]]) -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="tangram-test-") as folder:
        script = Script(Path(folder))
        try:
            for name in ("a", "b", "c", "a", "b"):  # the GPU is short from the start
                process = next(one for one in script.node.processes.values() if one.name == name)
                assert script.node.request(process, 3, wait_s=30.0) in (NodeAnswer.GRANTED, NodeAnswer.WAITS)
            for what, number in steps:
                script.do(what, number)
            script.rest()
            script.end_some()
            script.node.check_all_back()
            for process in script.node.processes.values():
                assert not process.errors
            slots = script.node.swaps._pools[GPU].slots
            assert slots is not None
            assert slots.free_bytes == slots.pool_bytes
        finally:
            script.node.close()

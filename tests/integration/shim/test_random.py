"""Random calls by every path, from several processes of one container: the driver never counts more for them than the limit.

A seed that fails is printed and fails again: the processes call one after the other, so a run depends only on its seed. A second test lets
them run against each other, and a watcher samples the driver's count.
"""

from __future__ import annotations

import random
import threading

import pytest

from tests.integration.shim.conftest import GPUS, OUT_OF_MEMORY, Stage, Worker, wait_for

LIMIT_MIB = 600
SIZES = (1, 2, 3, 17, 32, 64, 100, 150, 299)
FREE = {"plain": "free({})", "array": "array_end({})", "mipmap": "mipmap_end({})", "external": "external_end({})"}


class Program:
    """One process, and what it has."""

    def __init__(self, worker: Worker, dice: random.Random) -> None:
        self.worker, self.dice = worker, dice
        self.held: list[tuple[str, int]] = []
        self.blocks: list[int] = []
        self.maps: list[tuple[int, int]] = []
        self.graphs: list[int] = []
        self.stream = worker.must("stream_new()")
        self.pools = [worker.must("pool_of()"), worker.must("pool_new()")]
        worker.must(f"pool_keep({self.pools[1]}, 4000)")

    def step(self) -> None:
        """A step's refusal for want of memory is right; any other failure is not."""
        code = getattr(self, self.dice.choice(STEPS))()
        assert code in (0, OUT_OF_MEMORY), code

    def _made(self, kind: str, expression: str) -> int:
        code, at = self.worker.request(expression)
        if code == 0:
            self.held.append((kind, at))
        return int(code)

    def _size(self) -> int:
        return self.dice.choice(SIZES)

    def plain(self) -> int:
        return self._made("plain", f"alloc({self._size()})")

    def managed(self) -> int:
        return self._made("plain", f"managed({self._size()})")

    def in_order(self) -> int:
        return self._made("plain", f"stream_alloc({self._size()}, {self.dice.choice((0, self.stream))})")

    def of_pool(self) -> int:
        return self._made("plain", f"pool_alloc({self._size()}, {self.dice.choice(self.pools)}, {self.stream})")

    def array(self) -> int:
        return self._made("array", f"array(1024, {256 * self._size()})")

    def mipmap(self) -> int:
        return self._made("mipmap", f"mipmap(1024, {256 * self._size()}, 4)")

    def external(self) -> int:
        return self._made("external", f"external({self._size()})")

    def free(self) -> int:
        if not self.held:
            return 0
        kind, at = self.held.pop(self.dice.randrange(len(self.held)))
        how = f"stream_free({{}}, {self.stream})" if kind == "plain" and self.dice.random() < 0.5 else FREE[kind]
        code: int = self.worker.request(how.format(at))[0]
        if code == 1 and how.startswith("stream_free"):  # managed memory cannot be freed in a stream's order
            code = self.worker.request(FREE[kind].format(at))[0]
        return code

    def block(self) -> int:
        code, handle = self.worker.request(f"create({self._size() // 2 * 2 or 2})")
        if code == 0:
            self.blocks.append(handle)
        return int(code)

    def map_block(self) -> int:
        if not self.blocks:
            return 0
        code, at = self.worker.request(f"map_block({self.dice.choice(self.blocks)}, 2)")
        if code == 0:
            self.maps.append((at, 2))
        return int(code)

    def release(self) -> int:
        if not self.blocks:
            return 0
        return int(self.worker.request(f"release({self.blocks.pop(self.dice.randrange(len(self.blocks)))})")[0])

    def unmap(self) -> int:
        if not self.maps:
            return 0
        at, mib = self.maps.pop(self.dice.randrange(len(self.maps)))
        return int(self.worker.request(f"unmap({at}, {mib})")[0])

    def graph(self) -> int:
        made = self.worker.must(f"graph({self._size()}, {self._size()})")
        self.graphs.append(self.worker.must(f"graph_ready({made})"))
        return 0

    def launch(self) -> int:
        return (
            int(self.worker.request(f"graph_run({self.dice.choice(self.graphs)}, {self.stream})")[0])
            if self.graphs
            else 0
        )

    def end_graph(self) -> int:
        if not self.graphs:
            return 0
        self.worker.must(f"graph_end({self.graphs.pop()})")
        return int(self.worker.request("graph_trim()")[0])

    def synchronize(self) -> int:
        return int(self.worker.request(self.dice.choice(("context_sync()", f"stream_sync({self.stream})")))[0])

    def trim(self) -> int:
        return int(self.worker.request(f"pool_trim({self.dice.choice(self.pools)}, {self._size()})")[0])

    def give_all_back(self) -> None:
        while self.held:
            assert self.free() == 0
        for steps in (self.blocks and self.release, self.maps and self.unmap, self.graphs and self.end_graph):
            while steps and (
                self.blocks if steps == self.release else self.maps if steps == self.unmap else self.graphs
            ):
                assert steps() == 0
        self.worker.must("context_sync()")
        for pool in self.pools:
            self.worker.must(f"pool_trim({pool})")
        self.worker.must("graph_trim()")


STEPS = [
    *(
        "plain",
        "managed",
        "in_order",
        "in_order",
        "of_pool",
        "of_pool",
        "array",
        "mipmap",
        "external",
        "block",
        "map_block",
    ),
    *(
        "free",
        "free",
        "free",
        "free",
        "release",
        "unmap",
        "graph",
        "launch",
        "launch",
        "end_graph",
        "synchronize",
        "trim",
    ),
]


@pytest.mark.parametrize("seed", range(4))
def test_processes_that_alternate_never_exceed_the_limit(stage: Stage, seed: int) -> None:
    stage.grant((GPUS[0], LIMIT_MIB))
    dice = random.Random(seed)
    programs = [Program(stage.worker(), dice) for _ in range(3)]
    workers = [program.worker for program in programs]
    full = 0
    for number in range(400):
        dice.choice(programs).step()
        if number % 4 == 0:
            used = stage.true_mib(*workers)
            full = max(full, used)
            assert used <= LIMIT_MIB, f"seed {seed}, step {number}"
    assert full > LIMIT_MIB * 2 // 3, "a test that never comes near the limit shows nothing"
    for program in programs:
        program.give_all_back()
    assert stage.true_mib(*workers) == 0
    wait_for(lambda: workers[0].free_mib() >= LIMIT_MIB - 128, 20)
    assert workers[0].request(f"alloc({LIMIT_MIB})")[0] == 0, "nothing stays counted"


def test_processes_that_run_against_each_other_never_exceed_the_limit(stage: Stage) -> None:
    stage.grant((GPUS[0], LIMIT_MIB))
    programs = [Program(stage.worker(), random.Random(100 + n)) for n in range(4)]
    workers = [program.worker for program in programs]
    failures: list[BaseException] = []

    def run(program: Program) -> None:
        try:
            for _ in range(250):
                program.step()
        except BaseException as error:
            failures.append(error)
            raise

    threads = [threading.Thread(target=run, args=(program,)) for program in programs]
    for thread in threads:
        thread.start()
    samples = []
    while any(thread.is_alive() for thread in threads):
        samples.append(stage.true_mib(*workers))
    for thread in threads:
        thread.join()
    assert not failures
    assert max(samples) <= LIMIT_MIB
    assert len(samples) > 20
    for program in programs:
        program.give_all_back()
    assert stage.true_mib(*workers) == 0

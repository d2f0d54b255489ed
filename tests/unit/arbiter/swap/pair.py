"""Two containers of a simulated node that do not fit together."""

from __future__ import annotations

from tests.unit.arbiter.swap.node_kit import AWAY, SimulatedNode, SimulatedProcess, contract
from vgpu.memory.records import NodeAnswer


class Pair:
    """`big` has the whole GPU, and `small` waits for its guarantee: so 4 grains of `big` are to leave."""

    def __init__(self, node: SimulatedNode) -> None:
        self.node = node
        for name in ("big", "small"):
            node.join(name, contract(4, 16))
        self.big, self.small = node.process("big"), node.process("small")
        node.settle(1.0)
        for _ in range(4):
            assert node.request(self.big, 4) is NodeAnswer.GRANTED
        assert node.request(self.small, 4) is NodeAnswer.WAITS
        node.turn()
        node.now_s += 0.05

    def to_saving(self) -> None:
        """Until the copier has a job."""
        self.node.turn()
        self.big.step()
        self.node.turn()
        assert self.node.copier.jobs

    def to_away(self) -> None:
        self.node.settle(1.0)
        assert not self.node.requests
        assert states(self.big).count(AWAY) == 1

    def end_small(self) -> None:
        self.node.kill(self.small)
        self.node.swaps.working("big", True)

    def to_made(self) -> None:
        """Until its memory is being restored."""
        self.to_away()
        self.end_small()
        for _ in range(50):
            self.node.turn()
            if self.node.copier.jobs:
                return
            self.big.step()
            self.node.now_s += 0.01
        raise AssertionError("nothing is restored")

    def to(self, when: str) -> None:
        """Until a point of a swap: suspended, saving, away or made."""
        if when != "suspended":
            {"saving": self.to_saving, "away": self.to_away, "made": self.to_made}[when]()

    def connect(self) -> None:
        """To the next arbiter."""
        for process in self.node.processes.values():
            process.step()
            process.connect()
            self.node.use(process.name)


def states(process: SimulatedProcess) -> list[str]:
    return [block.state for block in process.blocks.values()]

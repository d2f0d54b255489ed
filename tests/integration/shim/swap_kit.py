"""A program that is swapped: its kernels compute, the test is its arbiter, and another process is the copier.

`hand` is that other process: it has no library, copies blocks by their descriptors, and suspends the program's channels, as the arbiter would.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Self

import pytest

from tests.built import REPOSITORY
from tests.integration.shim.burst_kit import burst
from tests.integration.shim.conftest import GPUS, MIB, Stage, wait_for
from tests.integration.shim.swapping_arbiter import BurstPeer, Lent, SwappingArbiter
from tests.line_process import LineProcess
from vgpu.protocol import wire
from vgpu.protocol.messages import UnableReason

OWNER = REPOSITORY / "tests/integration/fake_driver/owner.py"
NO_MEMORY, UNKNOWN, NO_DESCRIPTOR, DRIVER = (wire.Unable(0, reason) for reason in UnableReason)


class Program(LineProcess):
    """A process of owner.py, with or without the library."""

    def __init__(self, stage: Stage, *, library: bool) -> None:
        kernel = f"{stage.build}/fake/libfake-kernel.so"
        preload = f"{stage.library}:{kernel}" if library else kernel
        env = stage.env(LD_PRELOAD=preload, CUDA_VISIBLE_DEVICES="0", PYTHONPATH=str(REPOSITORY))
        super().__init__([str(OWNER)], env)

    def do(self, expression: str) -> Any:
        self.send(expression)
        return self.answer(f"in {expression}")


@dataclass
class Swap:
    """A program with memory, its arbiter, and the copier."""

    stage: Stage
    arbiter: SwappingArbiter
    program: Program
    hand: Program
    saved: dict[int, int] = field(default_factory=dict)
    """Block -> where the hand has its content."""
    peer: BurstPeer = field(init=False)

    def __post_init__(self) -> None:
        assert self.program.answer() == "ready"
        assert self.hand.answer() == "ready"
        self.peer = self.arbiter.burst()

    @property
    def folder(self) -> Any:
        return self.stage.folder / "grants" / self.stage.key

    def written(self, mib: float, seed: int) -> tuple[int, int, int]:
        """Memory of the program with a content: where, bytes, seed."""
        size = int(mib * MIB)
        at = self.program.do(f"alloc({size})")
        self.program.do(f"ok(launch('write', {at}, {size}, {seed}, 0)) or ok(done())")
        return at, size, seed

    def mapped(self, count: int, seed: int) -> tuple[int, int, int]:
        """The same, in blocks of 2 MiB of the program's own."""
        size = count * 2 * MIB
        at = self.program.do(f"blocks({count})")
        self.program.do(f"ok(launch('write', {at}, {size}, {seed}, 0)) or ok(done())")
        return at, size, seed

    def wrong(self, *pieces: tuple[int, int, int]) -> int:
        """Cells that are not as `written` left them, counted by a kernel: all memory is back."""
        wrong_at = self.program.do("pinned(4)")
        for at, size, seed in pieces:
            self.program.do(f"ok(launch('compare', {at}, {size}, {seed}, {wrong_at}))")
        self.program.do("ok(done())")
        return int(self.program.do(f"cell({wrong_at})"))

    def wrong_meanwhile(self, *pieces: tuple[int, int, int]) -> int:
        """The same without a kernel, slowly: other memory may be away."""
        return sum(self.program.do(f"wrong({at}, {size}, {seed})") for at, size, seed in pieces)

    def true_mib(self) -> int:
        lines = self.stage.driver_ctl("status").splitlines()
        return sum(
            int(line.split("used_mib=")[1].split()[0]) for line in lines if f"pid={self.program.process.pid} " in line
        )

    def halted(self) -> bool:
        """Are its compute and copy channels suspended?"""
        lines = self.stage.driver_ctl("kernel").splitlines()
        (line,) = (line for line in lines if line.startswith(f"pid={self.program.process.pid} "))
        held, copies = (int(line.split(f" {name}=")[1].split()[0]) for name in ("held", "copies_held"))
        return held > 0 or copies > 0

    def suspend(self, *, on: bool = True) -> None:
        """All channels of the program, compute and copy."""
        wait_for(lambda: self.arbiter.channels and self.arbiter.channels[-1].copy)
        last = self.arbiter.channels[-1]
        for channels in (last.compute, last.copy):
            assert self.hand.do(f"switch({last.client}, {list(channels)}, {on})") == 0

    def out(self, size: int = 2**40) -> list[Lent]:
        return self.peer.lent(wire.SwapOut(0, size))

    def save(self, blocks: list[Lent]) -> None:
        for block in blocks:
            at = self.hand.do(f"take({os.getpid()}, {block.fd}, {block.mib})")
            self.hand.do(f"kept.append(ctypes.string_at({at}, {block.bytes})) or ok(unmap({at}, {block.mib}))")
            self.saved[block.id] = len(self.saved)
            self.close(block)

    def restore(self, blocks: list[Lent]) -> None:
        for block in blocks:
            at = self.hand.do(f"take({os.getpid()}, {block.fd}, {block.mib})")
            place = self.saved[block.id]
            self.hand.do(f"ctypes.memmove({at}, kept[{place}], {block.bytes}) and ok(unmap({at}, {block.mib}))")
            self.close(block)

    @staticmethod
    def close(*blocks: Lent) -> None:
        for block in blocks:
            os.close(block.fd)

    def unmap(self, blocks: list[Lent]) -> None:
        for first in range(0, len(blocks), 64):
            ids = tuple(block.id for block in blocks[first : first + 64])
            assert self.peer.order(wire.Unmap(0, ids)) == wire.Unmapped(0, ids)

    def away(self, size: int = 2**40) -> list[Lent]:
        """Swaps so many bytes out."""
        blocks = self.out(size)
        self.save(blocks)
        self.unmap(blocks)
        return blocks

    def back(self, blocks: list[Lent]) -> None:
        for first in range(0, len(blocks), 64):
            ids = tuple(block.id for block in blocks[first : first + 64])
            made = self.peer.lent(wire.SwapIn(0, ids))
            assert tuple(block.id for block in made) == ids
            self.restore(made)
            self.peer.send(wire.Filled(0, ids))

    def settle(self) -> None:
        """What was sent is done: an order that is answered comes after it."""
        assert self.peer.order(wire.Unmap(0, (1,))) == UNKNOWN

    def arbiter_dies(self) -> None:
        self.arbiter.kill()

    def arbiter_comes(self) -> BurstPeer:
        self.arbiter = SwappingArbiter(self.folder)
        self.peer = self.arbiter.burst()
        return self.peer

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.program.end()
        self.hand.end()
        self.arbiter.kill()


@pytest.fixture
def swap(bare_stage: Stage) -> Iterator[Swap]:
    bare_stage.grant((GPUS[0], 1000))
    burst(bare_stage)
    arbiter = SwappingArbiter(bare_stage.folder / "grants" / bare_stage.key)
    with Swap(bare_stage, arbiter, Program(bare_stage, library=True), Program(bare_stage, library=False)) as made:
        yield made
        assert made.arbiter.wrong == []

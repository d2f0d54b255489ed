"""A container's PyTorch program with the shape of a model: serves requests, or trains, or multiplies. Obeys models.py.

["serve", SECONDS, RATE, SEED, TOKENS, GRAPH, AHEAD_US]  requests of a Poisson process, each TOKENS decode steps at batch 1: milliseconds each
["serve", ..., true]  the same, each with a kernel at its end, not counted, that measures the GPU's clock: MHz each, too
["serve", ..., true, true]  the same, each in a section that begins AHEAD_US before it
["start", "train", "gemm", "zeros" or "idler"], ["count"], ["stop"]  work without end

Python collects no garbage meanwhile: that takes tens of milliseconds with PyTorch loaded, of one request in some hundred.
"""

from __future__ import annotations

import gc
import random
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.insert(0, str(Path(__file__).parents[2] / "clients/python/src"))
import tangram

from bench.gpu_time.torch_work import Work, obey

LAYERS, WIDTH, HEADS, CACHED = 12, 1024, 16, 512
TRAIN_LAYERS, TRAIN_BATCH, TRAIN_LENGTH = 6, 16, 512
GEMM_SIDE = 16384
QUEUED = 2
SPIN_S = 0.0005
IDLER_CYCLES = 120_000_000
"""Some 60 ms at 1980 MHz."""
CLOCK_CYCLES = 200_000
"""Some 0.1 ms: what the events around it take is a hundredth or two, in all cases."""


class Decoder:
    """One token of a transformer at batch 1, with CACHED tokens before it."""

    def __init__(self) -> None:
        def weights(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, device="cuda", dtype=torch.bfloat16) * 0.02

        self._layers = [
            (weights(3 * WIDTH, WIDTH), weights(WIDTH, WIDTH), weights(4 * WIDTH, WIDTH), weights(WIDTH, 4 * WIDTH))
            for _ in range(LAYERS)
        ]
        self._keys, self._values = (weights(LAYERS, 1, HEADS, CACHED, WIDTH // HEADS) for _ in range(2))
        self._token = weights(1, 1, WIDTH)
        self.out = torch.empty_like(self._token)
        self._graph = torch.cuda.CUDAGraph()
        with torch.inference_mode():
            for _ in range(3):
                self._step()
            torch.cuda.synchronize()
            with torch.cuda.graph(self._graph):
                self._step()

    def _step(self) -> None:
        x = self._token
        for number, (qkv, out, up, down) in enumerate(self._layers):
            query, _, _ = functional.linear(functional.layer_norm(x, (WIDTH,)), qkv).chunk(3, dim=-1)
            query = query.view(1, 1, HEADS, WIDTH // HEADS).transpose(1, 2)
            seen = functional.scaled_dot_product_attention(query, self._keys[number], self._values[number])
            x = x + functional.linear(seen.transpose(1, 2).reshape(1, 1, WIDTH), out)
            x = x + functional.linear(functional.gelu(functional.linear(functional.layer_norm(x, (WIDTH,)), up)), down)
        self.out.copy_(x)

    @torch.inference_mode()
    def request(self, tokens: int, graph: bool, clock: bool) -> float:
        """Milliseconds that CLOCK_CYCLES took behind it; 0 where that was not requested."""
        for _ in range(tokens):
            if graph:
                self._graph.replay()
            else:
                self._step()
        result = self.out.float().sum()
        if not clock:
            result.item()
            return 0.0
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        torch.cuda._sleep(CLOCK_CYCLES)
        last.record()
        result.item()
        return first.elapsed_time(last)


def trainer() -> Callable[[], Any]:
    layer = torch.nn.TransformerEncoderLayer(WIDTH, HEADS, 4 * WIDTH, dropout=0.0, batch_first=True)
    model = torch.nn.TransformerEncoder(layer, TRAIN_LAYERS, enable_nested_tensor=False).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    batch = torch.randn(TRAIN_BATCH, TRAIN_LENGTH, WIDTH, device="cuda")

    def step() -> None:
        with torch.autocast("cuda", torch.bfloat16):
            loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def multiplier(make: Callable[..., torch.Tensor]) -> Callable[[], Any]:
    """Of what `make` makes: random numbers draw more power than zeros, of which no bit changes, in the same kernels."""
    one, other = (make(GEMM_SIDE, GEMM_SIDE, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    out = torch.empty_like(one)
    return lambda: torch.matmul(one, other, out=out)


def idler() -> Callable[[], Any]:
    """One thread that waits, so that the GPU draws little power and its clock stays high."""
    return lambda: torch.cuda._sleep(IDLER_CYCLES)


class Program(Work):
    def __init__(self, kind: str) -> None:
        self._decoder = Decoder() if kind == "serve" else None
        steps: dict[str, Callable[[], Any]] = {}
        if kind != "serve":
            gemm, zeros = multiplier(torch.randn), multiplier(torch.zeros)
            steps = {"train": trainer(), "gemm": gemm, "zeros": zeros, "idler": idler()}
        for step in steps.values():
            step()
        super().__init__({name: (step, QUEUED) for name, step in steps.items()})

    def serve(
        self,
        seconds: float,
        rate: float,
        seed: int,
        tokens: int,
        graph: bool,
        ahead_us: float,
        clock: bool = False,
        section: bool = False,
    ) -> dict[str, Any]:
        """A request that comes while another is served waits for it. Announced ones are so when they come, and use the GPU `ahead_us` later.

        That is a hint, or the begin of a section.
        """
        assert self._decoder is not None
        draw = random.Random(seed)
        took: list[float] = []
        mhz: list[float] = []
        began = comes = time.perf_counter()
        while True:
            comes += draw.expovariate(rate)
            if comes - began > seconds:
                return {"ms": took, "mhz": mhz}
            _until(comes)
            with tangram.latency_critical() if section else nullcontext():
                if ahead_us and not section:
                    tangram.hint(ahead_us)
                _until(comes + ahead_us / 1e6)
                beside_ms = self._decoder.request(tokens, graph, clock)
            took.append(1000 * (time.perf_counter() - comes - ahead_us / 1e6) - beside_ms)
            if clock:
                mhz.append(CLOCK_CYCLES / (1000 * beside_ms))


def _until(at: float) -> None:
    """Sleep most of it, then look."""
    if (left := at - time.perf_counter()) > SPIN_S:
        time.sleep(left - SPIN_S)
    while time.perf_counter() < at:
        pass


def main() -> None:
    program = Program(sys.argv[1])
    torch.cuda.synchronize()
    gc.disable()
    obey(program)


if __name__ == "__main__":
    main()

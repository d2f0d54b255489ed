"""A container's PyTorch server with the shape of a model of 8 billion parameters: batches its requests at each step, each a CUDA graph as in servers for production.

["serve", SECONDS, RATE, SEED]  requests of a Poisson process, each PROMPT tokens and TOKENS answers: milliseconds to each first token, between tokens,
                                and how long the GPU had work of it

A request waits for the step under way, then its prompt is read alone, then it joins the batch. `--small` is for a machine without a GPU, and has no graphs.
Without graphs the processor set the pace: 20 to 33 ms a step of the same server alone, from one minute to the next (H200). With them it is 8.
Python collects no garbage meanwhile: that takes tens of milliseconds with PyTorch loaded.
"""

from __future__ import annotations

import gc
import heapq
import random
import sys
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import torch
from torch.nn import functional

sys.path.insert(0, str(Path(__file__).parents[2]))
from bench.gpu_time.torch_work import Work, obey

PROMPT, TOKENS, SLOTS = 1024, 64, 48
BATCHES: Final = (1, 2, 4, 8, 16, 32, SLOTS)
"""Each has a graph for the first slots; the rows of slots without a request are computed for nothing."""


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of a decoder, in 16 bits."""

    layers: int = 32
    width: int = 4096
    heads: int = 32
    groups: int = 8
    """Heads of keys and values."""
    hidden: int = 14336
    words: int = 128256

    @property
    def head(self) -> int:
        return self.width // self.heads


EIGHT_BILLION: Final = Shape()
"""Of a published model: 16 GB."""
SMALL: Final = Shape(layers=2, width=64, heads=4, groups=2, hidden=128, words=512)


class Model:
    """Weights, and keys and values of SLOTS requests."""

    def __init__(self, shape: Shape, device: str) -> None:
        self.shape, self.device = shape, device
        self._seed = torch.Generator(device=device).manual_seed(1)
        both, narrow = shape.width + 2 * shape.groups * shape.head, shape.width
        self._layers = [
            (self._made(both, narrow), self._made(narrow, narrow), self._made(2 * shape.hidden, narrow), self._made(narrow, shape.hidden))
            for _ in range(shape.layers)
        ]  # fmt: skip
        self._words, self._out = self._made(shape.words, narrow), self._made(shape.words, narrow)
        self._norm = torch.ones(narrow, device=device, dtype=torch.bfloat16)
        room = (shape.layers, SLOTS, shape.groups, PROMPT + TOKENS, shape.head)
        self._keys, self._values = (torch.zeros(room, device=device, dtype=torch.bfloat16) for _ in range(2))
        angle = torch.arange(PROMPT + TOKENS, device=device)[:, None] / 10000 ** (
            torch.arange(0, shape.head, 2, device=device) / shape.head
        )
        self._cos, self._sin = (part.repeat(1, 2).to(torch.bfloat16) for part in (angle.cos(), angle.sin()))

    def _made(self, *shape: int) -> torch.Tensor:
        made = torch.empty(*shape, device=self.device, dtype=torch.bfloat16)
        return made.normal_(0, 0.02, generator=self._seed)

    def _normed(self, x: torch.Tensor) -> torch.Tensor:
        """Root mean square, in 32 bits as eager implementations have it."""
        wide = x.float()
        return self._norm * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-5)).to(x.dtype)

    def _turned(self, x: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        """Rotary positions: x is (requests, heads, tokens, head), at (requests, tokens)."""
        low, high = x.chunk(2, dim=-1)
        return x * self._cos[at][:, None] + torch.cat((-high, low), dim=-1) * self._sin[at][:, None]

    def _run(
        self, words: torch.Tensor, at: torch.Tensor, slots: torch.Tensor, seen: torch.Tensor | None
    ) -> torch.Tensor:
        """The next words of requests in these slots, whose words stand at these places. `seen`: which places each may see; None: those before it."""
        shape = self.shape
        x = self._words[words]
        count, length = words.shape
        for number, (qkv, out, up, down) in enumerate(self._layers):
            parts = functional.linear(self._normed(x), qkv).view(count, length, -1, shape.head).transpose(1, 2)
            query, key, value = parts.split([shape.heads, shape.groups, shape.groups], dim=1)
            query, key = self._turned(query, at), self._turned(key, at)
            self._keys[number][slots[:, None], :, at] = key.transpose(1, 2)
            self._values[number][slots[:, None], :, at] = value.transpose(1, 2)
            if seen is None:
                mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
            else:
                mixed = self._looked_up(query, self._keys[number][:count], self._values[number][:count], seen)
            x = x + functional.linear(mixed.transpose(1, 2).reshape(count, length, shape.width), out)
            gate, wide = functional.linear(self._normed(x), up).chunk(2, dim=-1)
            x = x + functional.linear(functional.silu(gate) * wide, down)
        return functional.linear(self._normed(x[:, -1]), self._out).argmax(-1)

    def _looked_up(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, seen: torch.Tensor
    ) -> torch.Tensor:
        """One query for each head, (requests, heads, 1, head), on keys and values of its group where they lie: those of the first slots, in order.
        Gathered by slot, a token took 42 ms at 20 requests a second, where it takes 11 now (H200, pairs.csv)."""
        heads = query.view(len(query), self.shape.groups, -1, self.shape.head)
        scores = (heads @ key.transpose(-1, -2)).float() * self.shape.head**-0.5
        return (scores.masked_fill(~seen, -torch.inf).softmax(-1).to(value.dtype) @ value).view_as(query)

    @torch.inference_mode()
    def read(self, words: torch.Tensor, slot: torch.Tensor) -> torch.Tensor:
        """A prompt's next word. Shapes: (1, PROMPT), (1,), and (1,)."""
        return self._run(words, torch.arange(PROMPT, device=self.device)[None], slot, None)

    @torch.inference_mode()
    def step(self, here: torch.Tensor) -> torch.Tensor:
        """One more word of the request in each of the first slots. `here`, (2, slots): its last word, and where that stands."""
        words, at = here
        slots = torch.arange(len(words), device=self.device)
        seen = torch.arange(PROMPT + TOKENS, device=self.device)[None, None, None] <= at[:, None, None, None]
        return self._run(words[:, None], at[:, None], slots, seen)


class Graph:
    """A function of tensors as a CUDA graph; without a GPU, the function itself."""

    def __init__(self, function: Callable[..., torch.Tensor], *inputs: torch.Tensor) -> None:
        self._function, self._inputs, self._graph = function, inputs, None
        if inputs[0].device.type != "cuda":
            return
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(2):
                function(*inputs)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._output = function(*inputs)
        self._graph = graph

    def __call__(self, *inputs: torch.Tensor) -> list[int]:
        """What it returns for these, when it is done."""
        for here, new in zip(self._inputs, inputs, strict=True):
            here.copy_(new)
        if self._graph is None:
            return self._function(*self._inputs).tolist()
        self._graph.replay()
        return self._output.tolist()


@dataclass(slots=True)
class Request:
    came_s: float
    slot: int = -1
    words: list[int] = field(default_factory=list)
    last_s: float = 0.0


class Server(Work):
    """See the module."""

    def __init__(self, shape: Shape, device: str) -> None:
        super().__init__({})
        model = Model(shape, device)
        self._prompts = torch.Generator().manual_seed(1)
        self._words = shape.words
        self._read = Graph(
            model.read, *(torch.zeros(size, dtype=torch.long, device=device) for size in ((1, PROMPT), (1,)))
        )
        self._steps = {
            size: Graph(model.step, torch.zeros((2, size), dtype=torch.long, device=device)) for size in BATCHES
        }
        self._first_ms: list[float] = []
        self._token_ms: list[float] = []
        self._busy_s = 0.0

    def serve(self, seconds: float, rate: float, seed: int) -> dict[str, Any]:
        """Until each request that comes in that time has its last word."""
        draw = random.Random(seed)
        began_s = time.perf_counter()
        comes: deque[float] = deque()
        at_s = began_s
        while (at_s := at_s + draw.expovariate(rate)) < began_s + seconds:
            comes.append(at_s)
        self._first_ms, self._token_ms, self._busy_s = [], [], 0.0
        free, live = list(range(SLOTS)), list[Request]()
        while comes or live:
            if not live and (wait_s := comes[0] - time.perf_counter()) > 0:
                time.sleep(wait_s)
            if comes and free and comes[0] <= time.perf_counter():
                live.append(self._begun(Request(comes.popleft(), heapq.heappop(free))))
            if live:
                self._step(live)
            for one in [one for one in live if len(one.words) == TOKENS]:
                live.remove(one)
                heapq.heappush(free, one.slot)
        took_s = time.perf_counter() - began_s
        return {"first_ms": self._first_ms, "token_ms": self._token_ms, "busy": self._busy_s / took_s}

    def _begun(self, one: Request) -> Request:
        began_s = time.perf_counter()
        words = torch.randint(self._words, (1, PROMPT), generator=self._prompts)
        one.words.extend(self._read(words, torch.tensor([one.slot])))
        one.last_s = time.perf_counter()
        self._first_ms.append(1000 * (one.last_s - one.came_s))
        self._busy_s += one.last_s - began_s
        return one

    def _step(self, live: list[Request]) -> None:
        began_s = time.perf_counter()
        here = [(0, PROMPT)] * next(size for size in BATCHES if size > max(one.slot for one in live))
        for one in live:
            here[one.slot] = (one.words[-1], PROMPT + len(one.words) - 1)
        found = self._steps[len(here)](torch.tensor(here).T)
        now_s = time.perf_counter()
        self._busy_s += now_s - began_s
        for one in live:
            one.words.append(found[one.slot])
            self._token_ms.append(1000 * (now_s - one.last_s))
            one.last_s = now_s


def main() -> None:
    small = "--small" in sys.argv
    server = Server(SMALL if small else EIGHT_BILLION, "cpu" if small else "cuda")
    gc.disable()
    obey(server)


if __name__ == "__main__":
    main()

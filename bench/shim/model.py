"""A small decoder in PyTorch, for the benchmarks of training and serving: plain layers, rotary positions, a KV cache.

It stands for programs that launch many small kernels; nothing in it is tuned. Shapes: tokens (batch, length), cache
(2, batch, heads, most, width of a head).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention, silu


@dataclass(frozen=True, slots=True)
class Shape:
    """Of a decoder."""

    vocabulary: int = 32000
    width: int = 2048
    layers: int = 16
    heads: int = 16
    hidden: int = 5632
    most: int = 1024
    """Positions that fit the cache."""

    @property
    def head(self) -> int:
        return self.width // self.heads


SMALL = Shape(vocabulary=4096, width=512, layers=4, heads=8, hidden=1536, most=256)
TINY = Shape(vocabulary=64, width=32, layers=2, heads=2, hidden=64, most=32)
"""For trying the program out without a GPU."""


class Layer(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.before, self.between = nn.RMSNorm(shape.width), nn.RMSNorm(shape.width)
        self.qkv = nn.Linear(shape.width, 3 * shape.width, bias=False)
        self.out = nn.Linear(shape.width, shape.width, bias=False)
        self.up, self.gate = (nn.Linear(shape.width, shape.hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(shape.hidden, shape.width, bias=False)

    def forward(self, x: Tensor, rotation: tuple[Tensor, Tensor], cache: Tensor | None, at: int) -> Tensor:
        batch, length, _ = x.shape
        parts = self.qkv(self.before(x)).view(batch, length, 3, self.shape.heads, self.shape.head)
        q, k, v = parts.permute(2, 0, 3, 1, 4)
        q, k = _rotated(q, rotation), _rotated(k, rotation)
        if cache is not None:
            cache[0, :, :, at : at + length] = k
            cache[1, :, :, at : at + length] = v
            k, v = cache[:, :, :, : at + length]
        seen = scaled_dot_product_attention(q, k, v, is_causal=length > 1)
        x = x + self.out(seen.transpose(1, 2).reshape(batch, length, -1))
        y = self.between(x)
        return x + self.down(silu(self.gate(y)) * self.up(y))


def _rotated(x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    one, two = x.chunk(2, -1)
    cos, sin = rotation
    return torch.cat((one * cos - two * sin, one * sin + two * cos), -1)


class Decoder(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.embedding = nn.Embedding(shape.vocabulary, shape.width)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.width)
        self.head = nn.Linear(shape.width, shape.vocabulary, bias=False)
        speed = 10000.0 ** (-torch.arange(shape.head // 2) * 2 / shape.head)
        angle = torch.outer(torch.arange(shape.most), speed)
        self.register_buffer("cos", angle.cos())
        self.register_buffer("sin", angle.sin())

    def forward(self, tokens: Tensor, caches: list[Tensor] | None = None, at: int = 0) -> Tensor:
        """Logits (batch, length, vocabulary). `at`: how many positions the caches have already."""
        x = self.embedding(tokens)
        length = tokens.shape[1]
        rotation = self.cos[at : at + length].to(x.dtype), self.sin[at : at + length].to(x.dtype)
        for number, layer in enumerate(self.layers):
            x = layer(x, rotation, caches[number] if caches else None, at)
        return self.head(self.norm(x))

    def new_caches(self, batch: int) -> list[Tensor]:
        like = self.head.weight
        shape = (2, batch, self.shape.heads, self.shape.most, self.shape.head)
        return [torch.empty(shape, dtype=like.dtype, device=like.device) for _ in self.layers]

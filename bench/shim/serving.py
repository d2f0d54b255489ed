"""Serve a small decoder, a round at a time: each line of stdin is one round, each line of stdout its times in milliseconds.

A round answers a request at batch 1 and one at batch 8: a prompt (time to first token) and then tokens one by one (time per
token, and the fastest of them: a core that another machine's work slows down for a while makes tokens up to twice as slow, and what the
library adds is in each). Every request takes a new cache, as a server does. Python collects no garbage meanwhile, which would come to one round and
not to the next. Runs with and without the library side by side; on_gpu.py decides when.
"""

from __future__ import annotations

import gc
import json
import sys
import time
from collections.abc import Callable
from itertools import pairwise

import torch
from model import TINY, Decoder, Shape

PROMPT, TOKENS = 512, 16


def timed(work: Callable[[], object], device: torch.device) -> float:
    """ms, with everything done that was begun."""
    begin = time.perf_counter()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter() - begin) * 1e3


def fastest(begins: list[float]) -> float:
    """ms from one to the next, at the least. `begins` in seconds."""
    return 1e3 * min(end - begin for begin, end in pairwise(begins))


class Server:
    def __init__(self, device: torch.device) -> None:
        torch.manual_seed(7)
        self.device = device
        tiny = device.type != "cuda"
        self.shape, self.prompt, self.tokens = (TINY, 8, 4) if tiny else (Shape(), PROMPT, TOKENS)
        self.net = Decoder(self.shape).to(device, torch.float32 if tiny else torch.bfloat16).eval()
        with torch.inference_mode():
            for batch in (1, 8):
                self.request(batch)

    def request(self, batch: int) -> tuple[float, float, float, Tokens]:
        """ms to the first token, for each further one, for the fastest of them as the processor sees it; the tokens."""
        prompt = torch.arange(batch * self.prompt, device=self.device).view(batch, -1) % self.shape.vocabulary
        caches: list[torch.Tensor] = []
        token = prompt[:, :1]

        def first() -> None:
            nonlocal token
            caches.extend(self.net.new_caches(batch))
            token = self.net(prompt, caches)[:, -1:].argmax(-1)

        def further() -> None:
            nonlocal token
            for number in range(self.tokens):
                begins.append(time.perf_counter())
                token = self.net(token, caches, self.prompt + number)[:, -1:].argmax(-1)

        begins: list[float] = []
        first_ms, further_ms = timed(first, self.device), timed(further, self.device) / self.tokens
        return first_ms, further_ms, fastest(begins), token[:, 0].tolist()

    def round(self) -> dict[str, float]:
        found: dict[str, float] = {}
        with torch.inference_mode():
            for batch in (1, 8):
                first_ms, further_ms, fastest_ms, _ = self.request(batch)
                found[f"serving_first_token_batch_{batch}_ms"] = first_ms
                found[f"serving_per_token_batch_{batch}_ms"] = further_ms
                found[f"serving_fastest_token_batch_{batch}_ms"] = fastest_ms
        return found


Tokens = list[int]


def main() -> None:
    server = Server(torch.device(sys.argv[1] if len(sys.argv) > 1 else "cuda"))
    gc.disable()
    print(json.dumps({"ready": True}), flush=True)
    for _ in sys.stdin:
        print(json.dumps(server.round()), flush=True)


if __name__ == "__main__":
    main()

"""Train a small decoder, a round at a time: each line of stdin is one round of STEPS steps, each line of stdout its milliseconds a step.

The fastest step is shown, too; serving.py has the reason.
"""

from __future__ import annotations

import gc
import json
import sys
import time

import torch
from model import SMALL, TINY, Decoder
from serving import fastest, timed

BATCH, LENGTH, STEPS = 8, 256, 8


class Trainer:
    def __init__(self, device: torch.device) -> None:
        torch.manual_seed(7)
        self.device = device
        tiny = device.type != "cuda"
        shape, self.steps = (TINY, 2) if tiny else (SMALL, STEPS)
        length = 16 if tiny else LENGTH
        self.net = Decoder(shape).to(device)
        self.optimizer = torch.optim.AdamW(self.net.parameters(), 3e-4)
        self.tokens = torch.randint(shape.vocabulary, (BATCH, length + 1), device=device)
        self.begins: list[float] = []
        """Of the steps that were done last."""
        self.steps_done(3)

    def steps_done(self, count: int) -> float:
        """The last loss."""
        loss = torch.zeros(())
        self.begins.clear()
        for _ in range(count):
            self.begins.append(time.perf_counter())
            with torch.autocast(self.device.type, torch.bfloat16):
                logits = self.net(self.tokens[:, :-1])
                loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), self.tokens[:, 1:].flatten())
            self.optimizer.zero_grad(set_to_none=True)
            loss.backward()
            self.optimizer.step()
        return float(loss.item())

    def round(self) -> dict[str, float]:
        step_ms = timed(lambda: self.steps_done(self.steps), self.device) / self.steps
        return {"training_step_ms": step_ms, "training_fastest_step_ms": fastest(self.begins)}


def main() -> None:
    trainer = Trainer(torch.device(sys.argv[1] if len(sys.argv) > 1 else "cuda"))
    gc.disable()
    print(json.dumps({"ready": True}), flush=True)
    for _ in sys.stdin:
        print(json.dumps(trainer.round()), flush=True)


if __name__ == "__main__":
    main()

"""Train a small model. A checkpoint is written now and then, and at SIGTERM; the next run continues from it."""

from __future__ import annotations

import argparse
import signal
import sys
from pathlib import Path
from typing import Any

import torch

WIDTH = 4096
GIB = 2**30
INTERRUPTED = 1
"""Exit status of a run that is not done: the Job then starts another pod."""


class Training:
    """A linear model that learns to negate its input."""

    def __init__(self) -> None:
        self.step = 0
        self._model = torch.nn.Linear(WIDTH, WIDTH, device="cuda")
        self._optimizer = torch.optim.SGD(self._model.parameters(), lr=0.01)

    def advance(self) -> float:
        """One step; the loss before it."""
        batch = torch.randn(WIDTH, WIDTH, device="cuda")
        loss = torch.nn.functional.mse_loss(self._model(batch), -batch)
        self._optimizer.zero_grad()
        loss.backward()
        self._optimizer.step()
        self.step += 1
        return float(loss.item())

    def save(self, path: Path) -> None:
        """Under its name when it is complete: the pod may be killed at any time."""
        part = path.with_suffix(".part")
        torch.save(
            {"step": self.step, "model": self._model.state_dict(), "optimizer": self._optimizer.state_dict()}, part
        )
        part.replace(path)

    def resume(self, path: Path) -> None:
        """Continue from a checkpoint."""
        saved: dict[str, Any] = torch.load(path, map_location="cuda", weights_only=True)
        self._model.load_state_dict(saved["model"])
        self._optimizer.load_state_dict(saved["optimizer"])
        self.step = saved["step"]


def main() -> int:
    """Train up to a number of steps; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--every", type=int, required=True, help="steps between two checkpoints")
    arguments = parser.parse_args()
    stopped: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _frame: stopped.append(number))
    print(f"sees {torch.cuda.mem_get_info()[1] / GIB:.1f} GiB")
    training = Training()
    if arguments.checkpoint.exists():
        training.resume(arguments.checkpoint)
        print(f"resumed at step {training.step}")
    while training.step < arguments.steps and not stopped:
        loss = training.advance()
        if training.step % arguments.every == 0:
            training.save(arguments.checkpoint)
            print(f"checkpoint at step {training.step}, loss {loss:.4f}")
    if stopped:
        training.save(arguments.checkpoint)
        print(f"stopped at step {training.step}")
        return INTERRUPTED
    print(f"done at step {training.step}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

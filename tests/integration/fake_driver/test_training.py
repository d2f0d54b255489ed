"""examples/12-training/train.py, with the module that stands in for PyTorch: stopped in the middle, it continues from its checkpoint."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from pathlib import Path

from tests.built import REPOSITORY

TRAIN = REPOSITORY / "examples/12-training/train.py"
STAND_IN = REPOSITORY / "deploy/images/stand-in"


def test_a_run_that_is_stopped_writes_a_checkpoint_and_the_next_one_continues(fake_driver, tmp_path: Path) -> None:
    env = fake_driver("gpu h200 memory_mib=8192 context_mib=0").env(PYTHONPATH=str(STAND_IN))

    def run(steps: int, every: int) -> subprocess.Popen[str]:
        command = [sys.executable, "-u", str(TRAIN), f"--steps={steps}", f"--every={every}", str(tmp_path / "model.pt")]
        return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True)

    with run(100_000, 2) as first:
        assert first.stdout is not None
        assert first.stdout.readline() == "sees 8.0 GiB\n"
        assert re.fullmatch(r"checkpoint at step 2, loss [\d.]+\n", first.stdout.readline())
        first.send_signal(signal.SIGTERM)
        *_, last = first.stdout.read().splitlines()
        assert first.wait(60) == 1, "the Job starts another pod"
    (step,) = re.findall(r"stopped at step (\d+)", last)
    with run(int(step) + 3, 1000) as second:
        assert second.stdout is not None
        assert second.stdout.read() == f"sees 8.0 GiB\nresumed at step {step}\ndone at step {int(step) + 3}\n"
        assert second.wait(60) == 0
    assert [one.name for one in tmp_path.iterdir() if one.suffix == ".part"] == []

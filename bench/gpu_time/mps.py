"""NVIDIA's MPS, to compare with: a control daemon of the bench's own, which only its programs find."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

CONTROL = "nvidia-cuda-mps-control"
PLACES = ("/usr/local/nvidia/bin", "/usr/bin", "/opt/bin")


class NoMps(RuntimeError):
    """MPS does not run here; the text gives the reason."""


@contextmanager
def server(folder: Path) -> Iterator[dict[str, str]]:
    """The environment in which a program is a client; it should have ended before the server does. Raises NoMps."""
    control = shutil.which(CONTROL, path=os.pathsep.join([os.environ.get("PATH", ""), *PLACES]))
    if control is None:
        raise NoMps(f"there is no {CONTROL} in PATH or {', '.join(PLACES)}")
    given = {f"CUDA_MPS_{name.upper()}_DIRECTORY": str(folder / f"mps-{name}") for name in ("pipe", "log")}
    for place in given.values():
        Path(place).mkdir(parents=True, exist_ok=True)
    done = subprocess.run(
        [control, "-d"], env=os.environ | given, capture_output=True, text=True, check=False, timeout=20
    )
    if done.returncode:
        raise NoMps(f"{CONTROL} -d ended with {done.returncode}: {done.stderr or done.stdout}")
    try:
        yield given
    finally:  # waits for remaining clients for so many seconds, and then ends it
        subprocess.run(
            [control],
            env=os.environ | given,
            input="quit -t 5\n",
            text=True,
            check=False,
            timeout=60,
            capture_output=True,
        )


def capped(percent: int) -> dict[str, str]:
    """What keeps a client to so many of the multiprocessors."""
    return {} if percent == 100 else {"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": str(percent)}

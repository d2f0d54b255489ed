"""Docker, where there is one: the engine that the docker command reaches."""

from __future__ import annotations

import shutil
import subprocess
from typing import IO


def docker_answers() -> bool:
    """The engine, not only the command."""
    if shutil.which("docker") is None:
        return False
    return subprocess.run(["docker", "info"], capture_output=True, check=False).returncode == 0


def docker(*arguments: str, stdin: IO[bytes] | None = None) -> str:
    """The command's output. Raises RuntimeError with the output when it fails."""
    done = subprocess.run(["docker", *arguments], stdin=stdin, capture_output=True, text=True, check=False)
    if done.returncode:
        output = (done.stdout + done.stderr).strip()[-4000:]
        raise RuntimeError(f"docker {' '.join(arguments[:8])} ...: ended with {done.returncode}\n{output}")
    return done.stdout.strip()

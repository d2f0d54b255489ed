"""One-shot C programs of shim/tests, run in a container of the stage."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass

from tests.integration.shim.conftest import Stage


@dataclass(frozen=True)
class Ran:
    """How a program ended. `codes` are the numbers that it printed: CUresults, unless the program's text states otherwise."""

    status: int
    codes: list[int]
    errors: str


def run(stage: Stage, program: str, *words: str, seconds: float = 60, **env: str) -> Ran:
    """shim/tests/<program>.c with these arguments."""
    return run_command(stage, [str(stage.build / "tests" / program), *words], seconds=seconds, **env)


def run_command(stage: Stage, command: list[str], seconds: float = 60, **env: str) -> Ran:
    """A command in the container's surroundings."""
    done = subprocess.run(
        command, env=stage.env(**env), capture_output=True, text=True, timeout=seconds, check=False, stdin=subprocess.DEVNULL
    )  # fmt: skip
    assert "Sanitizer" not in done.stderr, done.stderr
    words = done.stdout.split()
    assert all(word.lstrip("-").isdigit() for word in words), done.stdout + done.stderr
    return Ran(done.returncode, [int(word) for word in words], done.stderr)

"""A program ends while the library's thread queries the driver what is left of its work."""

from __future__ import annotations

import subprocess

import pytest

from tests.built import shim_build
from tests.integration.gputime.conftest import Node

ROUNDS = 4


@pytest.mark.parametrize("way", ["return", "exit", "thread", "quick", "_exit", "close"])
def test_nothing_calls_the_driver_when_it_has_ended(node: Node, way: str) -> None:
    """The fake driver ends a program by a signal that calls it then; here it lives on for a while."""
    grant = node.grant("one")
    env = node.driver.env(
        LD_PRELOAD=f"{node.library}:{node.kernel}",
        TANGRAM_GRANT=str(grant),
        TANGRAM_FAKE_STRICT_END="1",
        ENDING_LINGERS="1",
    )
    for _ in range(ROUNDS):
        command = [str(shim_build() / "tests/ending"), way]
        ended = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=False)
        assert (ended.returncode, ended.stdout) == (0, "0\n"), ended.stderr

"""A node in small whose container runs programs for aarch64, under qemu's user mode: daemon and arbiter are this machine's.

Built and run by `make arm64`, which names the build; without it the tests are skipped. What emulation cannot show is in docs/operations/arm64.md.
"""

from __future__ import annotations

import itertools
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from hack.arm64 import EMULATOR
from tests.built import shim_build
from tests.integration.shim.conftest import GPUS, Stage, a_node
from tests.probe import Probe


@pytest.fixture(scope="session")
def arm64() -> Path:
    """The library, the fake driver's libraries and the test programs for aarch64."""
    if "TANGRAM_ARM64_BUILD" not in os.environ:
        pytest.skip("run by `make arm64`")
    return Path(os.environ["TANGRAM_ARM64_BUILD"])


class EmulatedStage(Stage):
    """Its programs are for aarch64."""

    arm64: Path

    def bare_probe(self, route: str = "direct", key: str = "", **env: str) -> Probe:
        outside = self.env(key, **env)
        inside = {
            "LD_PRELOAD": env.get("LD_PRELOAD", str(self.arm64 / "libtangram.so")),
            "LD_LIBRARY_PATH": str(self.arm64 / "fake"),
        }
        given = [word for name in inside for word in ("-E", f"{name}={inside[name]}")]
        del outside["LD_PRELOAD"], outside["LD_LIBRARY_PATH"]
        pipe, program = subprocess.PIPE, self.arm64 / f"tests/probe-{route}"
        process = subprocess.Popen(
            [*EMULATOR, *given, program], env=outside, text=True, stdin=pipe, stdout=pipe, stderr=pipe
        )
        self._probes.append(Probe(process))
        return self._probes[-1]


@pytest.fixture(scope="session")
def emulated_node(arm64: Path) -> Iterator[Stage]:
    """A driver and an arbiter for all tests here."""
    with a_node(shim_build()) as made:
        made.start_arbiter("--grace-ms", "0")
        yield made


_keys = itertools.count()


@pytest.fixture
def stage(emulated_node: Stage, arm64: Path) -> Iterator[Stage]:
    """A container limited to 1000 MiB of the first GPU."""
    made = EmulatedStage(emulated_node.build, emulated_node.folder, f"k{next(_keys)}")
    made.arm64 = arm64
    made.grant((GPUS[0], 1000))
    yield made
    made.close()

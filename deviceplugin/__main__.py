"""The program `tangram-deviceplugin`."""

from __future__ import annotations

import os
import sys
from typing import Final

import uvloop

# Before gRPC is imported: its handlers of fork() can crash a child between fork() and exec(). No child of this program speaks gRPC.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")

from deviceplugin.app import run
from deviceplugin.settings import DevicePluginSettings
from observe.program import run_program

SWITCH_S: Final = 0.0005
"""A thread that computes lets another go on after this; Python's own 5 ms are as long as all calls for one container. Guessed."""


def main() -> None:
    """Entry point of the container."""
    os.umask(0o022)
    sys.setswitchinterval(SWITCH_S)
    run_program(DevicePluginSettings, run, loop=uvloop.run)


if __name__ == "__main__":
    main()

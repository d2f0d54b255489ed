"""The program `tangram-deviceplugin`."""

from __future__ import annotations

import os

import uvloop

from deviceplugin.app import run
from deviceplugin.settings import DevicePluginSettings
from observe.program import run_program


def main() -> None:
    """Entry point of the container."""
    os.umask(0o022)
    run_program(DevicePluginSettings, run, loop=uvloop.run)


if __name__ == "__main__":
    main()

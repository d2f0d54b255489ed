"""The program `tangram-extender`."""

from __future__ import annotations

import uvloop

from extender import heap
from extender.app import run
from extender.settings import Settings
from observe.program import run_program


def main() -> None:
    """Entry point of the container."""
    heap.keep()
    run_program(Settings, run, loop=uvloop.run)


if __name__ == "__main__":
    main()

"""The program `tangram-webhook`."""

from __future__ import annotations

import uvloop

from observe.program import run_program
from webhook.running import run
from webhook.settings import Settings


def main() -> None:
    """Entry point of the container."""
    run_program(Settings, run, loop=uvloop.run)


if __name__ == "__main__":
    main()

"""The program `tangram-webhook`.

On asyncio's own event loop: uvloop has 512 KiB of buffers for each connection with TLS, and reads 256 KiB from one before it serves the next.
"""

from __future__ import annotations

from observe.fair_loop import run_fairly
from observe.program import run_program
from webhook.app import run
from webhook.settings import Settings


def main() -> None:
    """Entry point of the container."""
    run_program(Settings, run, loop=run_fairly)


if __name__ == "__main__":
    main()

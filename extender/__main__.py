"""`tangram-extender`: read the settings, set up the log, run."""

from __future__ import annotations

import sys

import uvloop

from extender.running import run
from extender.settings import Settings
from observe.log import log_json
from observe.options import read
from vgpu.errors import TangramError


def main() -> None:
    """Entry point of the container."""
    settings = read(Settings)
    log_json(settings.log_level)
    try:
        uvloop.run(run(settings))
    except (TangramError, OSError) as error:
        sys.exit(f"tangram-extender: {error}")


if __name__ == "__main__":
    main()

"""`tangram-webhook`: read the settings, set up the log, run."""

from __future__ import annotations

import sys

import uvloop

from observe.log import log_json
from observe.options import read
from vgpu.errors import TangramError
from webhook.running import run
from webhook.settings import Settings


def main() -> None:
    """Entry point of the container."""
    settings = read(Settings)
    log_json(settings.log_level)
    try:
        uvloop.run(run(settings))
    except (TangramError, OSError) as error:
        sys.exit(f"tangram-webhook: {error}")


if __name__ == "__main__":
    main()

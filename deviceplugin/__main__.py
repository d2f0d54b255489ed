"""`tangram-deviceplugin`: read the settings, set up the log, run."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Sequence

from deviceplugin.app import run
from deviceplugin.settings import DevicePluginSettings
from kube.errors import NoClusterError
from observe.log import log_json
from observe.options import read


def main(arguments: Sequence[str] | None = None) -> None:
    """Run until SIGTERM or SIGINT."""
    settings = read(DevicePluginSettings, arguments)
    log_json(settings.log_level)
    os.umask(0o022)
    try:
        asyncio.run(run(settings))
    except (NoClusterError, OSError) as error:
        sys.exit(f"tangram-deviceplugin: {error}")


if __name__ == "__main__":
    main()

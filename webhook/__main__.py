"""`tangram-webhook`: read the settings, set up the log, run."""

from __future__ import annotations

import logging
import sys

import structlog
import uvloop
from pydantic import ValidationError
from pydantic_settings import CliApp

from vgpu.errors import TangramError
from webhook.running import run
from webhook.settings import Settings


def main() -> None:
    """Entry point of the container."""
    try:
        settings = CliApp.run(Settings)
    except (ValidationError, TangramError) as error:
        sys.exit(f"tangram-webhook: {error}")
    _log_json(settings.log_level)
    try:
        uvloop.run(run(settings))
    except (TangramError, OSError) as error:
        sys.exit(f"tangram-webhook: {error}")


def _log_json(level: str) -> None:
    number = logging.getLevelNamesMapping()[level.upper()]
    logging.basicConfig(level=max(number, logging.WARNING), format="%(message)s", stream=sys.stdout)
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso"),
            structlog.processors.dict_tracebacks,
            structlog.processors.JSONRenderer(),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(number),
        logger_factory=structlog.PrintLoggerFactory(),
    )


if __name__ == "__main__":
    main()

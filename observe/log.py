"""Lines of JSON on standard error: what happened, when, how severe, and of which pod, node or GPU.

Standard error, because standard output is for the output that a program's user requested. Other libraries' warnings come the same way.
"""

from __future__ import annotations

import logging
import sys

import structlog


def log_json(level: str) -> None:
    """Log what is at least as severe as `level`: debug, info, warning or error."""
    number = logging.getLevelNamesMapping()[level.upper()]
    logging.basicConfig(level=max(number, logging.WARNING), format="%(message)s", stream=sys.stderr)
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso"),
            structlog.processors.dict_tracebacks,
            structlog.processors.JSONRenderer(),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(number),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        cache_logger_on_first_use=True,
    )

"""tangram-arbiter: lend the GPU memory of each grant to the processes of its container."""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys

import structlog
from pydantic import ValidationError

from arbiter.container import Limits
from arbiter.metrics import serve_metrics
from arbiter.server import Server
from arbiter.settings import ArbiterSettings

_EPILOG = """\
Every option may also be set by an environment variable, e.g. TANGRAM_ARBITER_GRANTS_DIR.

The device plugin makes a directory for each allocation under the grants folder; the arbiter puts a socket into it, and the
library in the container connects there. Try it without a cluster:

  mkdir -p /tmp/grants/one
  tangram-arbiter --grants-dir /tmp/grants --metrics-port 9403
"""


def main(arguments: list[str] | None = None) -> int:
    """Run until SIGTERM or SIGINT. Returns the exit code."""
    settings = _settings(sys.argv[1:] if arguments is None else arguments)
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso"),
            structlog.processors.JSONRenderer(),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(getattr(logging, settings.log_level.upper())),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )
    log = structlog.get_logger()
    os.umask(0o022)
    server = Server(settings.grants_dir, _limits(settings))
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: server.stop())
    http = serve_metrics(server, settings.metrics_host, settings.metrics_port)
    log.info(
        "serving", grants=str(settings.grants_dir), metrics_port=http.server_port, directories=len(server.containers)
    )
    server.run()
    http.shutdown()
    http.server_close()
    log.info("stopped")
    return 0


def _limits(settings: ArbiterSettings) -> Limits:
    return Limits(
        recall_wait_s=settings.recall_wait_ms / 1000,
        grant_wait_s=settings.grant_wait_ms / 1000,
        grace_s=settings.grace_ms / 1000,
        connections=settings.connections_limit,
    )


def _settings(arguments: list[str]) -> ArbiterSettings:
    parser = argparse.ArgumentParser(
        "tangram-arbiter", description=__doc__, epilog=_EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, field in ArbiterSettings.model_fields.items():
        parser.add_argument(f"--{name.replace('_', '-')}", help=f"{field.description} (default {field.default})")
    given = {name: value for name, value in vars(parser.parse_args(arguments)).items() if value is not None}
    try:
        return ArbiterSettings(**given)
    except ValidationError as error:
        for problem in error.errors():
            name = ".".join(str(part) for part in problem["loc"])
            print(f"tangram-arbiter: {name} is {problem.get('input')!r}: {problem['msg']}", file=sys.stderr)
        raise SystemExit(2) from None


if __name__ == "__main__":
    sys.exit(main())

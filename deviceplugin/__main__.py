"""tangram-deviceplugin: offer this node's GPUs in pieces to the kubelet, and give each container what its pod was assigned."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import sys

import structlog
from pydantic import ValidationError
from pydantic_core import PydanticUndefined

from deviceplugin.app import run
from deviceplugin.settings import DevicePluginSettings
from kube.errors import NoClusterError

_EPILOG = """\
Every option may also be set by an environment variable, e.g. TANGRAM_DEVICEPLUGIN_NODE_NAME.

One runs on each node that has GPUs, as root, beside the arbiter. It finds the driver by looking under the driver root (a folder with
lib/libnvidia-ml.so.1 or usr/lib/.../libnvidia-ml.so.1, dev/nvidia0, ...), publishes what it finds as the node's annotation
tangram.sh/inventory, and registers tangram.sh/gpu-mem, gpu-core, gpu and mig-<profile> with the kubelet.

  tangram-deviceplugin --node-name "$(hostname)" --kubeconfig ~/.kube/config --driver-root /usr/local/nvidia --access cdi
  kubectl describe node "$(hostname)"          # Capacity and Allocatable show tangram.sh/gpu-mem
  curl localhost:9402/readyz                   # says what is missing, if anything
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
        cache_logger_on_first_use=True,
    )
    os.umask(0o022)
    try:
        asyncio.run(run(settings))
    except (NoClusterError, OSError) as error:
        print(f"tangram-deviceplugin: {error}", file=sys.stderr)
        return 1
    return 0


def _settings(arguments: list[str]) -> DevicePluginSettings:
    parser = argparse.ArgumentParser(
        "tangram-deviceplugin",
        description=__doc__,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    for name, field in DevicePluginSettings.model_fields.items():
        known = "" if field.default in (None, PydanticUndefined) else f" (default {field.default})"
        parser.add_argument(f"--{name.replace('_', '-')}", help=f"{field.description}{known}")
    given = {name: value for name, value in vars(parser.parse_args(arguments)).items() if value is not None}
    try:
        return DevicePluginSettings(**given)
    except ValidationError as error:
        for problem in error.errors():
            name = ".".join(str(part) for part in problem["loc"])
            found = "" if problem["type"] == "missing" else f" is {problem.get('input')!r}"
            print(f"tangram-deviceplugin: {name}{found}: {problem['msg']}", file=sys.stderr)
        raise SystemExit(2) from None


if __name__ == "__main__":
    sys.exit(main())

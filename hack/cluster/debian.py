"""Install the Debian packages whose commands are missing; leave a machine that has them alone."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Final

CLUSTER: Final[Mapping[str, str]] = {
    "runc": "runc",
    "iptables": "iptables",
    "conntrack": "conntrack",
    "socat": "socat",
    "unshare": "util-linux",
    "mount": "mount",
    "gcc": "gcc",
    "/usr/lib/cni/ptp": "containernetworking-plugins",
    "/usr/include/stdlib.h": "libc6-dev",
}
"""Command, or path of a file, and the package that has it. gcc is for the one cgo module, NVIDIA's toolkit."""

IMAGES: Final[Mapping[str, str]] = {"buildah": "buildah", "mmdebstrap": "mmdebstrap"}

_PATH: Final = f"{os.environ.get('PATH', '')}:/usr/local/sbin:/usr/sbin:/sbin"


def missing(wanted: Mapping[str, str]) -> list[str]:
    """Packages of which something is not there."""
    absent = [
        p for command, p in wanted.items() if not Path(command).exists() and not shutil.which(command, path=_PATH)
    ]
    return sorted(set(absent))


def install(packages: list[str]) -> None:
    if shutil.which("apt-get") is None:
        raise LookupError(
            f"missing {', '.join(packages)}: no apt-get to install them with, please install them by hand"
        )
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    install_command = ["apt-get", "install", "-y", "-qq", "--no-install-recommends", *packages]
    for command in (["apt-get", "update", "-qq"], install_command):
        answer = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        if answer.returncode:
            raise RuntimeError(f"{' '.join(command)}: ended with {answer.returncode}\n{answer.stderr[-2000:]}")

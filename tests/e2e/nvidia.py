"""What an administrator does once on a node for NVIDIA's container runtime, on the local cluster's first node."""

from __future__ import annotations

import subprocess
import sys

from hack.cluster.layout import Layout
from hack.kubectl import ROOT

SPECIFICATION = "/etc/cdi/nvidia.yaml"


def on_the_node(*command: str) -> None:
    """Run a command where the first node of the local cluster sees its own folders."""
    shell = [sys.executable, "-m", "hack.cluster", "shell", "--", *command]
    done = subprocess.run(shell, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, f"{' '.join(command)}: exit {done.returncode}\n{done.stderr}"


def generate_specification(driver_root: str, dev_root: str, libraries: str, **env: str) -> None:
    """NVIDIA's tool looks at the driver and describes it for the runtime. `libraries`: their folder."""
    programs = Layout().bin
    on_the_node(
        "env", *(f"{name}={value}" for name, value in env.items()), str(programs / "nvidia-ctk"), "cdi", "generate",
        f"--driver-root={driver_root}", f"--dev-root={dev_root}", f"--library-search-path={libraries}",
        "--device-name-strategy=uuid", f"--nvidia-cdi-hook-path={programs / 'nvidia-cdi-hook'}", f"--output={SPECIFICATION}",
    )  # fmt: skip


def remove_specification() -> None:
    on_the_node("rm", "-f", SPECIFICATION)

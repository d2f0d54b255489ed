"""Build the cluster's programs and Tangram's images at the same time: `python -m hack.prepare`.

Compilers keep the processors busy and image builds mostly wait for downloads, so both together take little longer than the programs
alone. What is built already costs nothing. The programs are built quietly: who waits for one of them says so.
"""

from __future__ import annotations

import subprocess
import sys

from hack.cluster.providers import docker_answers
from hack.kubectl import ROOT


def main() -> int:
    """Status of the first of the two that failed, else 0."""
    # where Docker answers the cluster is kind's, and few programs are needed
    few = ["kubernetes", "helm", "kind"] if docker_answers() else []
    programs = subprocess.Popen(
        [sys.executable, "-m", "hack.cluster", "build", "--quiet", *few], cwd=ROOT, stdout=subprocess.DEVNULL
    )
    try:
        images = subprocess.run([sys.executable, "-m", "hack.images", "build"], cwd=ROOT, stdout=subprocess.DEVNULL)
        return images.returncode or programs.wait()
    finally:
        programs.terminate()
        programs.wait()


if __name__ == "__main__":
    sys.exit(main())

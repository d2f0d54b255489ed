"""Build the cluster's programs and Tangram's images at the same time: `python -m hack.prepare [--provider local]`.

Compilers keep the processors busy and image builds mostly wait for downloads, so both together take little longer than the programs
alone. What is built already costs nothing. The programs are built quietly: a step that waits for one of them prints that, and this does at the end.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Sequence

from hack.cluster import programs as cluster_programs
from hack.cluster.build import results_folder
from hack.cluster.console import Steps
from hack.cluster.docker import docker_answers
from hack.cluster.layout import cache_folder
from hack.cluster.providers import NAMES
from hack.kubectl import ROOT


def missing(names: Sequence[str]) -> list[str]:
    """Those of the cluster's programs, or of the named ones, that are not built yet."""
    wanted = [module for module in cluster_programs.ALL if module.name in names] or cluster_programs.CLUSTER
    return [module.name for module in wanted if not results_folder(cache_folder(), module).is_dir()]


def main() -> int:
    """Status of the first of the two that failed, else 0."""
    parser = argparse.ArgumentParser(prog="python -m hack.prepare", description=__doc__.split(":")[0])
    parser.add_argument("--provider", choices=NAMES, help="default: kind where Docker answers, else local")
    parser.add_argument("--previous", action="store_true", help="also the image of the release before this one")
    arguments = parser.parse_args()
    provider = arguments.provider or ("kind" if docker_answers() else "local")
    build = [sys.executable, "-m", "hack.images", "build"]
    few = ["kubernetes", "helm", "kind"] if provider == "kind" else []  # the others come with it
    programs = subprocess.Popen(
        [sys.executable, "-m", "hack.cluster", "build", "--quiet", *few], cwd=ROOT, stdout=subprocess.DEVNULL
    )
    try:
        images = subprocess.run(build, cwd=ROOT, stdout=subprocess.DEVNULL)
        if arguments.previous and images.returncode == 0:
            images = subprocess.run([*build, "previous"], cwd=ROOT, stdout=subprocess.DEVNULL)
        if images.returncode == 0 and (ahead := missing(few)):
            with Steps().step(f"build {' '.join(ahead)} for the cluster"):
                programs.wait()
        return images.returncode or programs.wait()
    finally:
        programs.terminate()
        programs.wait()


if __name__ == "__main__":
    sys.exit(main())

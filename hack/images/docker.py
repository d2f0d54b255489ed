"""Build images with Docker, where its engine answers."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Final

from hack.cluster.console import Steps
from hack.images.catalogue import DOCKERFILE, ROOT, Image


class Docker:
    """The engine that the docker command reaches."""

    base: Final = "the Dockerfile's own"

    def make_base(self, steps: Steps) -> None:
        """Docker pulls it."""

    def build(self, image: Image, archive: Path) -> None:
        build = ["docker", "build", "--file", str(DOCKERFILE), "--target", image.target, "--tag", image.name, str(ROOT)]
        subprocess.run(build, check=True)
        subprocess.run(["docker", "save", "--output", str(archive), image.name], check=True)

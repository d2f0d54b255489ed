"""Build images with Docker, where its engine answers, by either of its builders.

The older builder (Debian's docker.io has no other) knows no ignore file beside the Dockerfile, so the context is put together here.
"""

from __future__ import annotations

import tarfile
import tempfile
from pathlib import Path
from typing import IO, Final

from hack.cluster.console import Steps
from hack.cluster.docker import docker
from hack.images.catalogue import DOCKERFILE, Image, context_files
from hack.images.commit import commit_argument


class Docker:
    """The engine that the docker command reaches."""

    base: Final = "the Dockerfile's own"

    def make_base(self, steps: Steps) -> None:
        """Docker pulls it."""

    def build(self, image: Image, archive: Path) -> None:
        """Build the stage and save it under the image's name."""
        with tempfile.TemporaryFile() as context:
            _write_context(context, image.root)
            context.seek(0)
            docker(
                "build",
                "--quiet",
                "--file",
                str(DOCKERFILE),
                "--target",
                image.target,
                commit_argument(image),
                "--tag",
                image.name,
                "-",
                stdin=context,
            )
        docker("save", "--output", str(archive), image.name)


def _write_context(to: IO[bytes], root: Path) -> None:
    """As a tar, whose files belong to root as they do in the image. Docker takes no tar for one that begins with a PAX header."""
    with tarfile.open(fileobj=to, mode="w", format=tarfile.GNU_FORMAT) as context:
        for path in context_files(root):
            context.add(root / path, path, recursive=False, filter=_as_roots)


def _as_roots(member: tarfile.TarInfo) -> tarfile.TarInfo:
    member.uid = member.gid = 0
    member.uname = member.gname = "root"
    return member

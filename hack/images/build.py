"""Build what is missing: one archive for each image, kept by key.

Archives lie in `<cache>/images/<image>-<key>.tar`; `<cache>/images/current/` links the ones that belong to the sources as they
are now. The stock scheduler's image is no stage of the Dockerfile: it is the one static binary that the cluster runs too.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Final, Protocol

from hack.cluster import archive, debian
from hack.cluster.build import build as build_programs
from hack.cluster.build import results_folder
from hack.cluster.console import Steps
from hack.cluster.docker import docker_answers
from hack.cluster.layout import cache_folder, current_images
from hack.cluster.programs import KUBERNETES, kubernetes_version
from hack.images.buildah import Buildah
from hack.images.catalogue import ROOT, Image, context_files, image_key
from hack.images.docker import Docker
from hack.images.names import rename

KEPT: Final = 3
"""Archives kept for each image, so that going back to a branch is no rebuild. Guessed."""


class Builder(Protocol):
    """What builds an archive from a stage of the Dockerfile."""

    @property
    def base(self) -> str: ...
    def make_base(self, steps: Steps) -> None: ...
    def build(self, image: Image, archive: Path) -> None: ...


def scheduler_image() -> str:
    """The name that the chart uses for the stock kube-scheduler."""
    return f"registry.k8s.io/kube-scheduler:{kubernetes_version()}"


def build_all(wanted: Sequence[Image], steps: Steps, *, scheduler: bool) -> list[Path]:
    """Build what the cache lacks. Returns the archives."""
    folder = cache_folder() / "images"
    folder.mkdir(parents=True, exist_ok=True)
    builder: Builder = Docker() if docker_answers() else _buildah(folder, steps)
    archives = []
    for image in wanted:
        path = (
            folder / f"{_file_name(image.name)}-{image_key(image, builder.base, list(context_files(image.root)))}.tar"
        )
        if not path.exists():
            builder.make_base(steps)
            with steps.step(f"build {image.name}"):
                _whole(path, image, builder)
        if image.root == ROOT:
            _make_current(path, _file_name(image.name))
        _drop_old(path, _file_name(image.name))
        archives.append(path)
    if scheduler:
        archives.append(_scheduler(folder, steps))
    return archives


def _buildah(folder: Path, steps: Steps) -> Buildah:
    packages = debian.missing(debian.IMAGES)
    if packages:
        with steps.step(f"install {' '.join(packages)}"):
            debian.install(packages)
    return Buildah(folder)


def _file_name(image: str) -> str:
    """`localhost/tangram:dev` -> `tangram`."""
    return image.rpartition("/")[2].partition(":")[0]


def _whole(path: Path, image: Image, builder: Builder) -> None:
    """The archive appears under its name when it is complete."""
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        builder.build(image, part)
        if image.names:
            rename(part, image.names)
        part.rename(path)
    finally:
        part.unlink(missing_ok=True)


def _scheduler(folder: Path, steps: Steps) -> Path:
    key = results_folder(cache_folder(), KUBERNETES).name.rpartition("-")[2]
    path = folder / f"kube-scheduler-{key}.tar"
    if not path.exists():
        program = build_programs(cache_folder(), (KUBERNETES,), steps)["kube-scheduler"]
        with steps.step(f"build {scheduler_image()}"):
            part = path.with_name(f"{path.name}.{os.getpid()}.part")
            archive.write(part, scheduler_image(), {"usr/local/bin/kube-scheduler": program}, ["kube-scheduler"])
            part.rename(path)
    _make_current(path, "kube-scheduler")
    _drop_old(path, "kube-scheduler")
    return path


def _make_current(path: Path, name: str) -> None:
    """Point `current/<name>.tar` at the archive."""
    link = current_images() / f"{name}.tar"
    link.parent.mkdir(parents=True, exist_ok=True)
    if not link.is_symlink() or link.readlink() != path:
        link.unlink(missing_ok=True)
        link.symlink_to(path)


def _drop_old(path: Path, name: str) -> None:
    """The oldest archives of the image; this one is now the newest."""
    path.touch()
    length = len(path.name) - len(".tar")
    alike = [p for p in path.parent.glob(f"{name}-*.tar") if len(p.name) - len(".tar") == length]
    for old in sorted(alike, key=lambda p: p.stat().st_mtime, reverse=True)[KEPT:]:
        old.unlink()

"""Build images without a container engine: mmdebstrap makes the base, buildah runs the Dockerfile in a chroot.

buildah has a storage folder of its own in the cache, so no other images are touched. Steps use the host's network and
its certificates: where TLS is intercepted, PyPI is reached all the same and none of it ends up in an image. Downloads and
zig's objects are kept by a volume, not by `RUN --mount=type=cache`: buildah 1.28 (Debian 12) in a chroot empties the stage's
whole root folder when it cleans up after such a mount.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from hack.cluster.console import Steps
from hack.cluster.node import snapshotter
from hack.images.catalogue import DOCKERFILE, IGNORED, ROOT, Image
from hack.images.commit import commit_argument

SUITE: Final = "trixie"
PACKAGES: Final = ("ca-certificates", "python3")
LEFT_OUT: Final = ("doc", "info", "locale", "man")
"""Folders of /usr/share that no container reads."""
FORGOTTEN: Final = ("etc/hostname", "etc/resolv.conf", "var/cache/ldconfig/aux-cache", "var/log/*.log", "var/log/apt/*")
"""Files that say on which machine or when the base was made."""

CERTIFICATES: Final = Path("/etc/ssl/certs")
PASSED: Final = ("SSL_CERT_FILE", "PIP_CERT")
"""Environment variables that reach the build as arguments."""

MOST_IMAGES: Final = 150
"""Guessed: about thirty builds, a few GB."""

CREATED_S: Final = 0
"""Time of every image, layer and file in a layer, seconds since 1970: the same sources on the same base give the same digest."""


class Buildah:
    """One storage folder."""

    def __init__(self, cache: Path) -> None:
        self._cache = cache
        cache.mkdir(parents=True, exist_ok=True)
        driver = "overlay" if snapshotter(cache) == "overlayfs" else "vfs"
        storage = cache / f"storage-{driver}"
        self._command = [
            "buildah",
            "--root",
            str(storage),
            "--runroot",
            f"/run/tangram-images-{hashlib.sha256(str(storage).encode()).hexdigest()[:8]}",
            "--storage-driver",
            driver,
        ]
        self._downloads = cache / "downloads"
        self._downloads.mkdir(exist_ok=True)
        self._log = cache / "build.log"

    @property
    def base(self) -> str:
        """Name of the base image; it changes with what the base is made of."""
        key = hashlib.sha256(repr((SUITE, PACKAGES, LEFT_OUT, FORGOTTEN)).encode()).hexdigest()[:12]
        return f"localhost/tangram-base:{SUITE}-{key}"

    def _run(self, command: Sequence[str]) -> str:
        """Output of a command, which also goes to the log."""
        answer = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        with self._log.open("a") as log:
            log.write(f"$ {' '.join(command)}\n{answer.stdout}{answer.stderr}")
        if answer.returncode:
            tail = (answer.stdout + answer.stderr).strip()[-4000:]
            raise RuntimeError(f"{' '.join(command[:8])} ...: ended with {answer.returncode}\n{tail}")
        return answer.stdout.strip()

    def _has(self, image: str) -> bool:
        command = [*self._command, "images", "--quiet", image]
        return subprocess.run(command, capture_output=True, check=False).returncode == 0

    def make_base(self, steps: Steps) -> None:
        if self._has(self.base):
            return
        tar = self._cache / "base.tar"
        with steps.step(f"make the base image: Debian {SUITE} with {', '.join(PACKAGES)}"):
            exclude = [f"--dpkgopt=path-exclude=/usr/share/{folder}/*" for folder in LEFT_OUT]
            include = f"--include={','.join(PACKAGES)}"
            forget = f"--customize-hook=cd $1 && rm -f {' '.join(FORGOTTEN)}"
            self._run(["mmdebstrap", "--quiet", "--variant=minbase", include, *exclude, forget, SUITE, str(tar)])
            container = self._run([*self._command, "from", "scratch"])
            self._run([*self._command, "add", "--quiet", container, str(tar), "/"])
            path = "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
            self._run([*self._command, "config", "--env", path, "--cmd", "/bin/bash", container])
            self._run([*self._command, "commit", "--quiet", "--rm", container, self.base])
            tar.unlink()

    def build(self, image: Image, archive: Path, objects: Path | None = None) -> None:
        """Build the stage and write it as an OCI archive under the image's name.

        `objects` is an empty folder for what zig compiles: with it every step is done anew, and only downloads are used again.
        """
        arguments = [f"--build-arg={name}={os.environ[name]}" for name in PASSED if os.environ.get(name)]
        volumes = [f"--volume={self._downloads}:/root/.cache"]
        volumes += [f"--volume={objects}:/root/.cache/zig"] if objects else []
        volumes += [f"--volume={CERTIFICATES}:{CERTIFICATES}:ro"] if CERTIFICATES.is_dir() else []
        command = [*self._command, "build", "--isolation", "chroot", "--network", "host"]
        command += ["--layers", "--force-rm", "--pull-never", *(["--no-cache"] if objects else [])]
        command += [f"--timestamp={CREATED_S}"] if image.root == ROOT else []
        command += ["--file", str(image.root / DOCKERFILE), "--ignorefile", str(image.root / IGNORED)]
        command += [f"--build-arg=BASE={self.base}", commit_argument(image), *arguments]
        self._run([*command, *volumes, "--target", image.target, "--tag", image.name, str(image.root)])
        self._run([*self._command, "push", "--quiet", image.name, f"oci-archive:{archive}:{image.name}"])
        self._forget_old_steps()

    def _forget_old_steps(self) -> None:
        """Every step of a build stays as an image without a name; drop them all when there are many."""
        if len(self._run([*self._command, "images", "--all", "--quiet"]).splitlines()) > MOST_IMAGES:
            self._run([*self._command, "rmi", "--prune", "--force"])

"""Files of Debian packages that tests run beside the library, without installing them."""

from __future__ import annotations

import subprocess
from pathlib import Path

from hack.cluster.layout import cache_folder


def debian_file(package: str, pattern: str) -> Path:
    """The file of a package, unpacked under the cache when it is not there yet."""
    folder = cache_folder() / "debian" / package
    if not (found := sorted(folder.glob(pattern))):
        folder.mkdir(parents=True, exist_ok=True)
        if _download(package, folder).returncode != 0:
            subprocess.run(["apt-get", "update", "-qq"], check=True, capture_output=True)
            _download(package, folder).check_returncode()
        (archive,) = folder.glob("*.deb")
        subprocess.run(["dpkg-deb", "-x", archive, folder], check=True)
        found = sorted(folder.glob(pattern))
    assert found, f"package {package} has no {pattern}"
    return found[0]


def _download(package: str, folder: Path) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(["apt-get", "download", "-qq", package], cwd=folder, check=False, capture_output=True)

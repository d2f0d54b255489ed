"""Where libtangram.so and the fake driver lie: packaged beside this code, in a source tree's build folder, or installed."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from tangramctl.errors import BadOption, Broken

LIBRARY: Final = "libtangram.so"
DAEMON: Final = "nvidia-fake-driverd"
HERE: Final = Path(__file__).resolve().parent
INSTALLED: Final = Path("/opt/tangram/lib")
"""In the image, and where the docs say to copy it."""
FAKE_INSTALLED: Final = Path("/opt/fake-driver/files")
_SEPARATORS: Final = " :$"
"""What the loader reads as the end of a name in LD_PRELOAD, or replaces."""


def library(given: Path | None) -> Path:
    """The library to load into the command. Raises BadOption, Broken."""
    if given is not None and not given.is_file():
        raise BadOption(f"--library is {given}: it must be a file, {LIBRARY} as `make library` builds it")
    places = [HERE / "lib", HERE.parent / "build/shim", INSTALLED]
    path = given or next((folder / LIBRARY for folder in places if (folder / LIBRARY).is_file()), None)
    if path is None:
        looked = ", ".join(str(folder) for folder in places)
        raise Broken(f"no {LIBRARY} in {looked}: build it with `make library`, or name it with --library")
    return _preloadable(path, LIBRARY)


def _preloadable(path: Path, what: str) -> Path:
    found = path.resolve()
    if any(c in str(found) for c in _SEPARATORS):
        raise Broken(f"{what} lies at {str(found)!r}: LD_PRELOAD cannot name a path with a blank, a colon or a $ in it")
    return found


def fake_driver(library: Path | None) -> Path:
    """The folder with the fake driver's programs and libraries. Raises Broken."""
    places = list(_fake_places(library))
    for folder in places:
        if (folder / DAEMON).is_file():
            return _preloadable(folder, "the fake driver")
    raise Broken(f"no fake driver ({DAEMON}) in {', '.join(map(str, places))}: build it with `make library`")


def _fake_places(library: Path | None) -> Iterator[Path]:
    if library is not None:
        yield library.resolve().parent / "fake"
    yield HERE / "lib/fake"
    yield HERE.parent / "build/shim/fake"
    yield FAKE_INSTALLED
    on_path = shutil.which(DAEMON)
    if on_path:
        yield Path(os.path.realpath(on_path)).parent

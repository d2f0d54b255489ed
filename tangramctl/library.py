"""Where libtangram.so and the fake driver lie: in a source tree's build folder, packaged beside this code, or installed."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

from tangramctl.errors import BadOption, Broken

LIBRARY: Final = "libtangram.so"
COPIER: Final = "tangram-copier"
DAEMON: Final = "nvidia-fake-driverd"
HERE: Final = Path(__file__).resolve().parent
TREE: Final = HERE.parent if (HERE.parent / "shim/Makefile").is_file() else None
"""The source tree that contains this code; None in an installed wheel. What was built in it comes first: a packaged copy may be older."""
INSTALLED: Final = Path("/opt/tangram/lib")
"""In the image, and where the docs have it copied."""
FAKE_INSTALLED: Final = Path("/opt/fake-driver/files")
_SEPARATORS: Final = " :$"
"""What the loader reads as the end of a name in LD_PRELOAD, or replaces."""


def library(given: Path | None) -> Path:
    """The library to load into the command. Raises BadOption, Broken."""
    if given is not None and not given.is_file():
        raise BadOption(f"--library is {given}: it must be a file, {LIBRARY} as `make library` builds it")
    places = [*_built(), HERE / "lib", INSTALLED]
    path = given or next((folder / LIBRARY for folder in places if (folder / LIBRARY).is_file()), None)
    if path is None:
        cure = "build it with `make library`" if TREE else "this wheel was built without it: build one with it"
        raise Broken(f"no {LIBRARY} in {_listed(places)}: {cure}, or name it with --library")
    return _preloadable(path, LIBRARY)


def copier(library: Path) -> Path | None:
    """The copier's program: beside the library, packaged or installed. None where there is none."""
    places = [library.resolve().parent, HERE / "lib", INSTALLED]
    return next((folder / COPIER for folder in places if os.access(folder / COPIER, os.X_OK)), None)


def _built() -> list[Path]:
    return [TREE / "build/shim"] if TREE else []


def _listed(places: Iterable[Path]) -> str:
    return ", ".join(dict.fromkeys(map(str, places)))


def _preloadable(path: Path, what: str) -> Path:
    found = path.resolve()
    if any(c in str(found) for c in _SEPARATORS):
        raise Broken(f"{what} is at {str(found)!r}: LD_PRELOAD cannot name a path with a blank, a colon or a $ in it")
    return found


def fake_driver(library: Path | None) -> Path:
    """The folder with the fake driver's programs and libraries. Raises Broken."""
    places = list(_fake_places(library))
    for folder in places:
        if (folder / DAEMON).is_file():
            return _preloadable(folder, "the fake driver")
    cure = (
        "build it with `make library`"
        if TREE
        else "no wheel has it: --fake works in a source tree, after `make library`"
    )
    raise Broken(f"no fake driver ({DAEMON}) in {_listed(places)}: {cure}")


def _fake_places(library: Path | None) -> Iterator[Path]:
    if library is not None:
        yield library.resolve().parent / "fake"
    yield from (folder / "fake" for folder in (*_built(), HERE / "lib"))
    yield FAKE_INSTALLED
    on_path = shutil.which(DAEMON)
    if on_path:
        yield Path(os.path.realpath(on_path)).parent

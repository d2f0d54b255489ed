"""The command line: `python -m hack.images build [NAME ...]`, names being those of the Dockerfile's targets, and `index`, which joins archives of several platforms."""

from __future__ import annotations

import argparse
import fcntl
import sys
from pathlib import Path
from typing import Final

from hack.cluster.caller import become_root, make_folder
from hack.cluster.console import Steps
from hack.cluster.layout import cache_folder
from hack.images.build import build_all
from hack.images.catalogue import IMAGES, previous_image
from hack.images.index import join
from hack.images.oci import BadArchive

PREVIOUS: Final = "previous"
"""The release before this one, with which an upgrade begins: only when it is named."""
KNOWN: Final = (*sorted(image.target for image in IMAGES), "kube-scheduler")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m hack.images", description="Build Tangram's container images.")
    commands = parser.add_subparsers(dest="command", required=True)
    build = commands.add_parser("build", help="build what the cache lacks")
    names = f"some of {', '.join(KNOWN)} (default: all), {PREVIOUS} (the release before this one)"
    build.add_argument("targets", nargs="*", metavar="NAME", help=names)
    index = commands.add_parser("index", help="join OCI archives of one image, one for each platform")
    index.add_argument("name", help="of the image, as REGISTRY/tangram:0.1.0")
    index.add_argument("target", type=Path, help="archive to write")
    index.add_argument("archives", type=Path, nargs="+", metavar="ARCHIVE")
    return parser


def _index(name: str, target: Path, archives: list[Path]) -> int:
    try:
        print(f"{target}: {name} for {', '.join(join(target, name, archives))}")
    except (BadArchive, OSError) as error:
        print(f"index: {error}", file=sys.stderr)
        return 1
    return 0


def main() -> int:
    arguments = _parser().parse_args()
    if arguments.command == "index":
        return _index(arguments.name, arguments.target, arguments.archives)
    become_root("hack.images")
    unknown = set(arguments.targets) - {*KNOWN, PREVIOUS}
    if unknown:
        print(f"images {', '.join(sorted(unknown))}: there are {', '.join((*KNOWN, PREVIOUS))}", file=sys.stderr)
        return 2
    targets = set(arguments.targets) or set(KNOWN)
    make_folder(cache_folder())
    try:
        with (cache_folder() / "images.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            wanted = [image for image in IMAGES if image.target in targets]
            wanted += [previous_image()] if PREVIOUS in targets else []
            for path in build_all(wanted, Steps(), scheduler="kube-scheduler" in targets):
                print(path)
    except (LookupError, OSError, RuntimeError) as error:
        print(f"build: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

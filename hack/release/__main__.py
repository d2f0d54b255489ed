"""The command line: `python -m hack.release COMMAND`."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from hack.images.catalogue import ROOT
from hack.images.oci import BadArchive
from hack.release import krew, man, notes, reproducible, sbom, signature, version


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m hack.release", description="Make and check what a release is made of."
    )
    commands = parser.add_subparsers(dest="command", required=True)
    twice = commands.add_parser("reproducible", help="build twice and compare the bytes")
    twice.add_argument(
        "parts", nargs="*", metavar="PART", help=f"some of {', '.join(reproducible.PARTS)} (default: all)"
    )
    bill = commands.add_parser("sbom", help="write the SBOM of an image (SPDX 2.3 JSON)")
    bill.add_argument("archive", type=Path, help="an OCI archive of one platform")
    bill.add_argument("to", type=Path, metavar="FILE")
    number = commands.add_parser("version", help="print the version, set it, or check that all copies agree")
    number.add_argument("wanted", nargs="?", metavar="VERSION", help="set it in every file")
    number.add_argument("--check", action="store_true", help="exit 1 if a copy differs")
    number.add_argument("--tag", help="exit 1 if this tag is not v and the version")
    trial = commands.add_parser(
        "sign-trial", help="sign files with a throw-away key and no transparency log, and verify"
    )
    trial.add_argument("files", nargs="+", type=Path, metavar="FILE")
    same = commands.add_parser(
        "digest", help="print the digest of an image, and exit 1 if a second archive has another one"
    )
    same.add_argument("archives", nargs="+", type=Path, metavar="ARCHIVE")
    pin = commands.add_parser("pin", help="write the image's digest into the chart's values")
    pin.add_argument("digest")
    for name, text in (("krew", "krew's manifest and archive"), ("man", "the man page and the completion scripts")):
        commands.add_parser(name, help=f"write {text}").add_argument("folder", type=Path)
    commands.add_parser("notes", help="print the changelog's section of a version").add_argument(
        "wanted", metavar="VERSION"
    )
    return parser


def _digest(archives: list[Path]) -> list[str]:
    first, *others = [reproducible.digests(path) for path in archives]
    print(first["manifest"])
    return [line for other in others for line in reproducible.differences("image", first, other)]


def _krew(folder: Path) -> None:
    wanted = krew.requirement()
    packed = krew.archive(wanted)
    (folder / krew.file_name()).write_bytes(packed)
    (folder / "krew-tangram.yaml").write_text(krew.manifest(packed, wanted))


def _man(folder: Path) -> None:
    """Dated by SOURCE_DATE_EPOCH, so that a second build gives the same page."""
    from tangramctl.completion import SHELLS, script

    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{man.NAME}.1").write_text(man.page(int(os.environ.get("SOURCE_DATE_EPOCH", "0"))))
    for shell in SHELLS:
        (folder / f"{man.NAME}.{shell}").write_text(script(shell) + "\n")


def _reproducible(parts: list[str]) -> list[str]:
    unknown = set(parts) - set(reproducible.PARTS)
    if unknown:
        return [f"{', '.join(sorted(unknown))}: there are {', '.join(reproducible.PARTS)}"]
    return [line for part in parts or reproducible.PARTS for line in reproducible.compare(part)]


def _version(wanted: str | None, tag: str | None, *, check: bool) -> list[str]:
    if wanted:
        print("\n".join(version.write(wanted)))
    print(version.version())
    wrong = list(version.differences()) if check or wanted else []
    if tag is not None and tag != f"v{version.version()}":
        wrong.append(f"tag {tag}: this tree is v{version.version()}")
    return wrong


def main() -> int:
    arguments = _parser().parse_args()
    wrong: list[str] = []
    try:
        match arguments.command:
            case "reproducible":
                wrong = _reproducible(arguments.parts)
            case "sbom":
                sbom.write(arguments.archive, arguments.to)
            case "version":
                wrong = _version(arguments.wanted, arguments.tag, check=arguments.check)
            case "sign-trial":
                wrong = signature.trial(arguments.files)
            case "digest":
                wrong = _digest(arguments.archives)
            case "pin":
                values = ROOT / "deploy/helm/tangram/values.yaml"
                values.write_text(notes.pinned(arguments.digest, values.read_text()))
            case "krew":
                _krew(arguments.folder)
            case "man":
                _man(arguments.folder)
            case "notes":
                print(notes.notes(arguments.wanted, notes.changelog()), end="")
    except (BadArchive, LookupError, OSError, RuntimeError, ValueError) as error:
        wrong = [str(error)]
    for line in wrong:
        print(f"release: {line}", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())

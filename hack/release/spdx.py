"""An SBOM as SPDX 2.3 JSON. Pure: the same contents give the same document, so its time is the image's.

Source of the fields: the SPDX 2.3 specification, clauses 6 to 11, and its JSON schema, which the tests hold it to.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Final

from hack.release.contents import Contents
from hack.release.packages import OUR_FOLDER, OURS, Package, release

NAMESPACE: Final = "https://tangram.sh/spdx"
"""A namespace need not exist as a page; it has to be unique, which the image's digest makes it."""
_IMAGE: Final = "SPDXRef-Image"
_UNKNOWN: Final = "NOASSERTION"


def identifier(*words: str) -> str:
    """`SPDXRef-...` of letters, digits, dots and hyphens; any other character becomes its code."""
    plain = (re.sub(r"[^A-Za-z0-9.-]", lambda found: f"-{ord(found[0]):x}-", word) for word in words)
    return "SPDXRef-" + "-".join(plain)


def document(
    contents: Contents, found: Sequence[Package], loose: Sequence[str], *, version: str, compiler: str
) -> dict[str, Any]:
    """The whole document. `loose` are files of no package; `compiler` is the version of zig that compiled what is in shim/."""
    created = str(contents.config.get("created", "1970-01-01T00:00:00Z"))
    packages = [_image(contents, version), *map(_package, found), _compiler(compiler)]
    ours = [path for path in sorted(contents.files) if path.startswith(OUR_FOLDER)]
    names = [package["SPDXID"] for package in packages]
    if len(set(names)) != len(names):
        raise ValueError(f"packages of one identifier: {sorted({name for name in names if names.count(name) > 1})}")
    return {
        "spdxVersion": "SPDX-2.3",
        "dataLicense": "CC0-1.0",
        "SPDXID": "SPDXRef-DOCUMENT",
        "name": f"{OURS}-{version}",
        "documentNamespace": f"{NAMESPACE}/{OURS}-{version}-{contents.digest.rpartition(':')[2]}",
        "creationInfo": {"created": _whole_seconds(created), "creators": [f"Tool: {OURS}-hack-release-{version}"]},
        "packages": packages,
        "files": [_file(contents, path) for path in [*ours, *loose]],
        "relationships": [
            _relation("SPDXRef-DOCUMENT", "DESCRIBES", _IMAGE),
            *(_relation(_IMAGE, "CONTAINS", identifier(p.kind, p.name, p.version)) for p in found),
            *(_relation(_IMAGE, "CONTAINS", identifier("file", path)) for path in [*ours, *loose]),
            *(_relation(packages[-1]["SPDXID"], "BUILD_TOOL_OF", identifier("file", path)) for path in ours),
        ],
    }


def _whole_seconds(time: str) -> str:
    return re.sub(r"\.\d+Z$", "Z", time)


def _relation(first: str, kind: str, second: str) -> dict[str, str]:
    return {"spdxElementId": first, "relationshipType": kind, "relatedSpdxElement": second}


def _purl(url: str) -> dict[str, str]:
    return {"referenceCategory": "PACKAGE-MANAGER", "referenceType": "purl", "referenceLocator": url}


def _image(contents: Contents, version: str) -> dict[str, Any]:
    kind, _, digest = contents.digest.partition(":")
    architecture = contents.config.get("architecture", "unknown")
    return {
        "SPDXID": _IMAGE,
        "name": OURS,
        "versionInfo": version,
        "primaryPackagePurpose": "CONTAINER",
        "downloadLocation": _UNKNOWN,
        "filesAnalyzed": False,
        "licenseConcluded": _UNKNOWN,
        "licenseDeclared": "Apache-2.0",
        "copyrightText": _UNKNOWN,
        "supplier": "Organization: Tangram",
        "checksums": [{"algorithm": kind.upper(), "checksumValue": digest}],
        "comment": f"linux/{architecture}, on {release(contents).get('PRETTY_NAME', 'an unknown system')}",
        "externalRefs": [_purl(f"pkg:oci/{OURS}@{kind}%3A{digest}?arch={architecture}")],
    }


def _package(package: Package) -> dict[str, Any]:
    return {
        "SPDXID": identifier(package.kind, package.name, package.version),
        "name": package.name,
        "versionInfo": package.version,
        "downloadLocation": _UNKNOWN,
        "filesAnalyzed": False,
        "licenseConcluded": _UNKNOWN,
        "licenseDeclared": package.licence,
        "copyrightText": _UNKNOWN,
        "externalRefs": [_purl(package.url)],
        **({"homepage": package.homepage} if package.homepage.startswith("http") else {}),
    }


def _compiler(version: str) -> dict[str, Any]:
    return _package(Package("pypi", "ziglang", version, f"pkg:pypi/ziglang@{version}", "MIT", "https://ziglang.org/"))


def _file(contents: Contents, path: str) -> dict[str, Any]:
    found = contents.files[path]
    return {
        "SPDXID": identifier("file", path),
        "fileName": f"/{path}",
        "checksums": [
            {"algorithm": "SHA1", "checksumValue": found.sha1},
            {"algorithm": "SHA256", "checksumValue": found.sha256},
        ],
        "licenseConcluded": "Apache-2.0" if path.startswith(OUR_FOLDER) else _UNKNOWN,
        "copyrightText": _UNKNOWN,
    }

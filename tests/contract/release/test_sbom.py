"""The SBOM says what is in the image, and is SPDX 2.3 by its official schema."""

from __future__ import annotations

import hashlib
import json
import struct
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from hack.cluster.layout import current_images
from hack.images.oci import BadArchive
from hack.release import contents, packages, sbom, spdx
from hack.release.spdx import identifier
from tests.contract.release.oci import Layer, archive

SCHEMA = Path(__file__).with_name("spdx-2.3.schema.json")
SCHEMA_SHA256 = "239208b7ac287b3cf5d9a9af23f9d69863971102a5e1587a27a398b43490b89b"
"""Of schemas/spdx-schema.json at tag v2.3 of github.com/spdx/spdx-spec, commit aadf3b0b8dbbabdb4d880b0fc714255fea436ff7; its licence is CC-BY-3.0."""

SITE = "opt/tangram/venv/lib/python3.13/site-packages"
STATUS = """Package: dash
Status: install ok installed
Architecture: amd64
Version: 0.5.12-12+b1
Homepage: http://gondor.apana.org.au/~herbert/dash/

Package: gone
Status: deinstall ok config-files
Architecture: amd64
Version: 1.0
"""
BASE: Layer = {
    "usr/lib/os-release": 'PRETTY_NAME="Debian GNU/Linux 13 (trixie)"\nID=debian\nVERSION_ID="13"\n',
    "var/lib/dpkg/status": STATUS,
    "var/lib/dpkg/info/dash.list": "/.\n/bin/dash\n",
    "var/lib/dpkg/info/dash.postinst": "#!/bin/sh\n",
    "usr/bin/dash": b"\x7fELF",
    "usr/local/bin/pip": "#!/bin/sh\n",
}


def distribution(name: str, version: str, licence: str = "MIT") -> Layer:
    return {
        f"{SITE}/{name}.py": "",
        f"{SITE}/__pycache__/{name}.cpython-313.pyc": b"compiled",
        f"{SITE}/{name}-{version}.dist-info/METADATA": f"Metadata-Version: 2.4\nName: {name}\nVersion: {version}\nLicense-Expression: {licence}\n\ntext\n",
        f"{SITE}/{name}-{version}.dist-info/RECORD": f"{name}.py,sha256=x,0\n../../../bin/{name},,\n",
        f"opt/tangram/venv/bin/{name}": "#!/usr/bin/python3\n",
    }


def idna() -> Layer:
    (version,) = sbom.locked()["idna"]
    return distribution("idna", version)


OURS: Layer = {"opt/tangram/lib/libtangram.so": b"library", "opt/tangram/lib/tangram-trial": b"program"}


def made(tmp_path: Path, *layers: Layer, env: tuple[str, ...] = ()) -> Path:
    path = tmp_path / "image.tar"
    archive(path, layers, env)
    return path


def validate(document: dict[str, Any]) -> None:
    schema = json.loads(SCHEMA.read_text())
    jsonschema.Draft7Validator(schema, format_checker=jsonschema.FormatChecker()).validate(document)


def test_the_schema_is_the_official_one() -> None:
    assert hashlib.sha256(SCHEMA.read_bytes()).hexdigest() == SCHEMA_SHA256


def test_an_sbom_names_packages_of_the_system_of_python_and_our_files(tmp_path: Path) -> None:
    document = sbom.sbom(made(tmp_path, BASE, idna(), OURS))
    validate(document)
    (version,) = sbom.locked()["idna"]
    urls = {package["externalRefs"][0]["referenceLocator"] for package in document["packages"]}
    assert f"pkg:pypi/idna@{version}" in urls
    assert "pkg:deb/debian/dash@0.5.12-12%2Bb1?arch=amd64&distro=debian-13" in urls
    assert "gone" not in {package["name"] for package in document["packages"]}
    files = {file["fileName"]: file["checksums"] for file in document["files"]}
    sha256 = {"algorithm": "SHA256", "checksumValue": hashlib.sha256(b"library").hexdigest()}
    assert sha256 in files["/opt/tangram/lib/libtangram.so"]
    assert "/usr/local/bin/pip" in files, "what runs and belongs to no package is named by its path"
    assert "/usr/bin/dash" not in files
    assert not any("idna" in name or "postinst" in name for name in files)
    named = {"SPDXRef-DOCUMENT", *(thing["SPDXID"] for key in ("packages", "files") for thing in document[key])}
    for relation in document["relationships"]:
        assert {relation["spdxElementId"], relation["relatedSpdxElement"]} <= named
    assert document["creationInfo"]["created"] == "2026-11-27T10:00:00Z"


def test_the_same_image_gives_the_same_document(tmp_path: Path) -> None:
    path = made(tmp_path, BASE, OURS)
    assert sbom.sbom(path) == sbom.sbom(path)


def test_what_a_later_layer_removes_or_replaces_is_not_named(tmp_path: Path) -> None:
    later: Layer = {
        "usr/local/bin/.wh.pip": b"",
        "opt/tangram/lib/.wh..wh..opq": b"",
        "opt/tangram/lib/tangram-trial": b"new",
    }
    image = contents.read(made(tmp_path, BASE, OURS, later))
    assert "usr/local/bin/pip" not in image.files
    assert "opt/tangram/lib/libtangram.so" not in image.files
    assert image.files["opt/tangram/lib/tangram-trial"].sha256 == hashlib.sha256(b"new").hexdigest()


def test_a_python_of_its_own_is_named(tmp_path: Path) -> None:
    own: Layer = {"usr/local/bin/python3.13": b"\x7fELF", "usr/local/lib/python3.13/os.py": b""}
    document = sbom.sbom(made(tmp_path, BASE, own, OURS, env=("PYTHON_VERSION=3.13.9",)))
    validate(document)
    assert "SPDXRef-generic-python-3.13.9" in {package["SPDXID"] for package in document["packages"]}
    assert "/usr/local/bin/python3.13" not in {file["fileName"] for file in document["files"]}


def test_a_package_that_is_not_in_the_lock_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadArchive, match=r"idna 0\.1: uv\.lock has \d"):
        sbom.sbom(made(tmp_path, BASE, distribution("idna", "0.1")))
    with pytest.raises(BadArchive, match=r"not-there 1: uv\.lock has no such package"):
        sbom.sbom(made(tmp_path, BASE, distribution("Not_There", "1")))


def pyc(flags: int, time_s: int) -> bytes:
    return b"magi" + struct.pack("<III", flags, time_s, 1) + b"code"


def test_a_compiled_file_that_python_would_ignore_is_named(tmp_path: Path) -> None:
    """Files of these archives are of 1970. A hash of the source (flags 1 and 3) is not compared with its time."""
    cache = "usr/lib/python3/__pycache__"
    image = contents.read(
        made(tmp_path, {
            "usr/lib/python3/a.py": "", f"{cache}/a.cpython-313.pyc": pyc(0, 0), f"{cache}/a.cpython-313.opt-1.pyc": pyc(0, 7),
            f"{cache}/gone.cpython-313.pyc": pyc(0, 7), "usr/lib/python3/b.py": "", f"{cache}/b.cpython-313.pyc": pyc(1, 7),
        })
    )  # fmt: skip
    assert packages.stale(image) == [f"{cache}/a.cpython-313.opt-1.pyc"]
    with pytest.raises(
        BadArchive, match=r"1 compiled Python files are older than their source, such as usr/lib/python3/"
    ):
        sbom.sbom(tmp_path / "image.tar")


def test_a_licence_that_is_no_spdx_expression_is_not_passed_on(tmp_path: Path) -> None:
    image = contents.read(
        made(tmp_path, distribution("a", "1", "LicenseRef-theirs"), distribution("b", "1", "MIT OR Apache-2.0"))
    )
    assert {p.name: p.licence for p in packages.packages(image)} == {"a": "NOASSERTION", "b": "MIT OR Apache-2.0"}


def test_a_hard_link_has_the_content_that_it_links_to(tmp_path: Path) -> None:
    image = contents.read(made(tmp_path, {"usr/bin/a": b"x", "usr/bin/b": "-> usr/bin/a"}))
    assert image.files["usr/bin/b"] == image.files["usr/bin/a"]


def test_a_file_that_is_no_archive_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "image.tar"
    archive(path, [BASE])
    other = tmp_path / "other.tar"
    other.write_bytes(path.read_bytes().replace(b"index.json", b"other.json"))
    with pytest.raises(BadArchive, match=r"no index\.json: not an OCI archive"):
        contents.read(other)


def test_identifiers_of_different_names_differ() -> None:
    assert identifier("deb", "a", "1:2+b") == "SPDXRef-deb-a-1-3a-2-2b-b"
    assert identifier("deb", "a", "1~2") != identifier("deb", "a", "1+2")


@pytest.mark.skipif(not (current_images() / "tangram.tar").exists(), reason="the image is not built: make images")
def test_the_image_itself_has_nothing_that_no_package_brought() -> None:
    """As it was built last, so its packages may be those of an earlier lock file: a release compares them."""
    image = contents.read(current_images() / "tangram.tar")
    found = packages.packages(image)
    assert {"deb", "pypi"} <= {package.kind for package in found}
    assert {path for path in image.files if path.startswith(packages.OUR_FOLDER)} == {
        f"{packages.OUR_FOLDER}{name}" for name in ("libtangram.so", "tangram-copier", "tangram-trial")
    }
    assert packages.stale(image) == []
    loose = packages.unowned(image, found)
    assert [path for path in loose if "/site-packages/" in path or path.startswith("usr/bin/")] == []
    validate(spdx.document(image, found, loose, version="0", compiler="0"))

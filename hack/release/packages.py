"""Which packages an image has, by the records of its package managers. Pure."""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from email.parser import HeaderParser
from pathlib import PurePosixPath
from typing import Final
from urllib.parse import quote

from hack.release.contents import Contents, normal

OURS: Final = "tangram"
"""Our own distribution: it is described, and not looked up in the lock file."""
OUR_FOLDER: Final = "opt/tangram/lib/"
"""What the Dockerfile puts there is compiled from shim/."""
LEFT_OUT: Final = ("etc/", "var/lib/dpkg/info/")
"""Settings, and the package manager's own scripts: no program that a package or a build brought."""

_EXPRESSION: Final = re.compile(r"[A-Za-z0-9.+() -]+")


@dataclass(frozen=True, slots=True)
class Package:
    """`kind` is `deb`, `pypi` or `generic`, as package URLs name them."""

    kind: str
    name: str
    version: str
    url: str
    """Package URL."""
    licence: str = "NOASSERTION"
    homepage: str = ""
    files: frozenset[str] = frozenset()


def packages(contents: Contents) -> list[Package]:
    """Everything that a package manager installed, and a Python that none did."""
    return [*_debian(contents), *_python(contents), *_interpreter(contents)]


def release(contents: Contents) -> dict[str, str]:
    """os-release(5) as a dictionary."""
    text = contents.records.get("usr/lib/os-release") or contents.records.get("etc/os-release") or ""
    pairs = (line.partition("=") for line in text.splitlines() if "=" in line and not line.startswith("#"))
    return {key: value.strip("\"'") for key, _, value in pairs}


def _debian(contents: Contents) -> Iterator[Package]:
    system = release(contents)
    distribution = quote(f"{system.get('ID', 'debian')}-{system.get('VERSION_ID', 'unknown')}", safe="")
    for paragraph in contents.records.get("var/lib/dpkg/status", "").split("\n\n"):
        fields = HeaderParser().parsestr(paragraph.lstrip("\n"))
        if not fields.get("Status", "").endswith(" installed"):
            continue
        name, version, architecture = fields["Package"], fields["Version"], fields["Architecture"]
        lists = (f"var/lib/dpkg/info/{name}{suffix}.list" for suffix in ("", f":{architecture}"))
        owned = "\n".join(contents.records.get(path, "") for path in lists)
        yield Package(
            "deb", name, version,
            f"pkg:deb/{system.get('ID', 'debian')}/{quote(name, safe='')}@{quote(version, safe='')}?arch={architecture}&distro={distribution}",
            homepage=fields.get("Homepage", ""),
            files=frozenset(normal(path) for path in owned.splitlines() if path),
        )  # fmt: skip


def _python(contents: Contents) -> Iterator[Package]:
    for path, text in sorted(contents.records.items()):
        folder = PurePosixPath(path).parent
        if not path.endswith(".dist-info/METADATA"):
            continue
        fields = HeaderParser().parsestr(text)
        name, version = canonical(fields["Name"]), fields["Version"]
        expression = fields.get("License-Expression", "")
        usable = _EXPRESSION.fullmatch(expression) and "LicenseRef" not in expression
        rows = csv.reader(contents.records.get(str(folder / "RECORD"), "").splitlines())
        yield Package(
            "pypi", name, version, f"pkg:pypi/{quote(name, safe='')}@{quote(version, safe='')}",
            licence=expression if usable else "NOASSERTION",
            homepage=fields.get("Home-page", ""),
            files=frozenset(_below(folder.parent, row[0]) for row in rows if row),
        )  # fmt: skip


def canonical(name: str) -> str:
    """As PyPI compares names: PEP 503."""
    return re.sub(r"[-_.]+", "-", name).lower()


def _below(folder: PurePosixPath, path: str) -> str:
    """A path of RECORD, which may begin with `../`, as one from the root."""
    parts: list[str] = list(folder.parts)
    for part in PurePosixPath(path).parts:
        if part == "..":
            parts.pop()
        else:
            parts.append(part)
    return normal("/".join(parts))


def _interpreter(contents: Contents) -> Iterator[Package]:
    """Images of Docker's `python` compile it themselves into /usr/local and say which one by a variable."""
    variables = (pair.partition("=") for pair in contents.config.get("config", {}).get("Env", []))
    version = {name: value for name, _, value in variables}.get("PYTHON_VERSION")
    if version:
        below = ("usr/local/bin/", "usr/local/lib/libpython", "usr/local/lib/python")
        files = frozenset(path for path in contents.files if path.startswith(below))
        yield Package(
            "generic",
            "python",
            version,
            f"pkg:generic/python@{quote(version, safe='')}",
            "Python-2.0",
            "https://www.python.org/",
            files,
        )


def unowned(contents: Contents, found: list[Package]) -> list[str]:
    """Files that run and belong to no package and are not ours."""
    owned = frozenset().union(*(package.files for package in found))
    return sorted(
        path for path, file in contents.files.items()
        if file.runs and not {path, source_of(path)} & owned and not path.startswith((OUR_FOLDER, *LEFT_OUT))
    )  # fmt: skip


def stale(contents: Contents) -> list[str]:
    """Compiled Python files that Python ignores, because their source has another time: each start of a program would compile them again."""
    found = ((path, file, contents.files.get(source_of(path))) for path, file in contents.files.items())
    return sorted(
        path
        for path, file, source in found
        if source and file.compiled_from_s is not None and file.compiled_from_s != source.mtime_s & 0xFFFFFFFF
    )


def source_of(path: str) -> str:
    """`a/__pycache__/b.cpython-313.pyc` -> `a/b.py`; any other path as it is."""
    compiled = re.fullmatch(r"(.*)__pycache__/([^/]+?)\.cpython-\d+(?:\.opt-\d)?\.pyc", path)
    return f"{compiled[1]}{compiled[2]}.py" if compiled else path


def differences(found: list[Package], locked: Mapping[str, frozenset[str]]) -> list[str]:
    """Sentences about Python packages that the lock file does not have so. `locked` is name -> versions."""
    return [
        f"{package.name} {package.version}: uv.lock has {', '.join(sorted(locked.get(package.name, ()))) or 'no such package'}"
        for package in found
        if package.kind == "pypi" and package.name != OURS and package.version not in locked.get(package.name, ())
    ]

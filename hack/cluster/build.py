"""Build the cluster's programs, once for each version.

Results lie in `<cache>/cluster/<module>-<key>/`, where the key covers the module's files and the flags. A folder appears
under its final name only when it is complete, so a build that was cut off is built again and never half used.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from hack.cluster.caller import as_person, make_folder, own_by_person
from hack.cluster.console import Steps
from hack.cluster.programs import Module, kubernetes_version, linker_flags, module_key
from hack.cluster.toolchain import find_go

COMPILER_MEMORY: Final = {"GOGC": "off", "GOMEMLIMIT": "2GiB"}
"""A compiler lives for seconds: it collects garbage only when it would grow past this. With no debug information, which the linker
drops anyway, that is 23 % less processor time (etcd from nothing on two cores: 109 s to 84 s)."""


SHARED_FLAGS: Final = ("-gcflags=all=-dwarf=false",)
"""Part of a package's key in the compiler's cache. Not -trimpath: with it a key has the version that its module requires, also where
it is replaced, and helm would share nothing with kubernetes."""


def results_folder(cache: Path, module: Module) -> Path:
    key = module_key(module, linker_flags(module, kubernetes_version()))
    return cache / "cluster" / f"{module.name}-{key}"


def _compile(go: str, module: Module, folder: Path) -> None:
    target = folder / module.programs[0] if len(module.packages) == 1 else folder
    command = [go, "build", *SHARED_FLAGS, "-ldflags", linker_flags(module, kubernetes_version())]
    if module.tags:
        command += ["-tags", ",".join(module.tags)]
    environment = {
        **os.environ,
        "CGO_ENABLED": "1" if module.cgo else "0",
        "GOFLAGS": "-mod=readonly -buildvcs=false",
        "GOTOOLCHAIN": "local",
        "GOWORK": "off",
        **COMPILER_MEMORY,
    }
    command += ["-o", str(target) + ("/" if target is folder else ""), *module.packages]
    answer = subprocess.run(
        command, cwd=module.folder, env=environment, capture_output=True, text=True, check=False, **as_person()
    )
    if answer.returncode:
        raise RuntimeError(f"{module.name}: go build ended with {answer.returncode}\n{answer.stderr.strip()[-4000:]}")


def build(cache: Path, modules: Sequence[Module], steps: Steps) -> dict[str, Path]:
    """Every program's path by name, `links` included. Builds what the cache lacks."""
    programs: dict[str, Path] = {}
    for module in modules:
        folder = results_folder(cache, module)
        if not folder.is_dir():
            with steps.step(f"build {module.name} (kept in {folder})"), _alone(cache, module):
                if not folder.is_dir():
                    _build_one(cache, module, folder)
        programs |= {name: folder / name for name in module.programs}
        programs |= dict.fromkeys(module.links, folder / module.programs[0])
    return programs


@contextmanager
def _alone(cache: Path, module: Module) -> Iterator[None]:
    """One that builds a module at a time; a second one waits, and finds it built."""
    make_folder(cache / "cluster")
    with (cache / "cluster" / f"{module.name}.lock").open("w") as lock:
        own_by_person(Path(lock.name))
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _build_one(cache: Path, module: Module, folder: Path) -> None:
    part = folder.with_name(f"{folder.name}.{os.getpid()}.part")
    make_folder(part)
    try:
        _compile(find_go(cache), module, part)
        part.rename(folder)
    finally:
        shutil.rmtree(part, ignore_errors=True)


def link_programs(programs: dict[str, Path], folder: Path) -> None:
    """Make `folder` contain one link for each program, and nothing else."""
    folder.mkdir(parents=True, exist_ok=True)
    for stale in folder.iterdir():
        if stale.name not in programs:
            stale.unlink()
    for name, program in programs.items():
        link = folder / name
        if link.is_symlink() and link.readlink() == program:
            continue
        link.unlink(missing_ok=True)
        link.symlink_to(program)

"""Where the CDI specification of this node comes from: NVIDIA's, as the toolkit or GPU Operator wrote it; one that `nvidia-ctk` makes now; or our own alone.

Whatever NVIDIA's say is checked against this machine (`vgpu.api.cdi_vendor`) at each writing, so one that is old, of another driver or wrong is left for the next. The reason is
logged when it changes. A file that came, went or changed is seen by its version (`stale`), before each start of a container.

`refresh` may start a program and take as long as that may. `document` reads files only.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import structlog

from deviceplugin.gpus import cdi
from deviceplugin.gpus.bounded_run import RunFailed, output_of
from deviceplugin.gpus.driver_files import drm_nodes
from deviceplugin.gpus.driver_paths import NODE_ROOT, DriverRoot
from deviceplugin.grants.atomic_file import FileVersion, version_of
from vgpu.api.cdi_spec import LARGEST_BYTES, BadSpec, Spec, spec_from_text
from vgpu.api.cdi_vendor import COMMON, Machine, Wanted, merged, trouble
from vgpu.api.inventory import Inventory
from vgpu.health.presence import bus_address

GENERATE_S: Final = 30.0
"""That `nvidia-ctk` may take. Guessed: without persistence mode it initialises every GPU."""
MOST_FILES: Final = 32
"""That are looked at in a folder of specifications. Guessed."""
CHROOT: Final = "/usr/sbin/chroot"
TOOL_PATHS: Final = (
    "usr/bin/nvidia-ctk", "usr/local/bin/nvidia-ctk", "usr/local/nvidia/toolkit/nvidia-ctk", "opt/nvidia/toolkit/nvidia-ctk",
)  # fmt: skip
"""Of the host: packages, GPU Operator's toolkit container."""
_VENDORS: Final = re.compile(r"[\w.-]*nvidia[\w.-]*\.(?:ya?ml|json)\Z")

log = structlog.get_logger("deviceplugin.gpus.cdi_source")


@dataclass(frozen=True, slots=True)
class Source:
    """One specification of NVIDIA's."""

    name: str
    """Path of the file, or of the program."""
    spec: Spec


class CdiSource:
    """Of one node. `cdi_dir`: where container runtimes read ours. `may_open`: may a program open the GPUs now? For any thread."""

    def __init__(
        self, cdi_dir: Path, root: Callable[[], DriverRoot], *, vendors: bool = True, may_open: Callable[[], bool] = lambda: True,
        chroot: str = CHROOT, generate_s: float = GENERATE_S,
    ) -> None:  # fmt: skip
        self._cdi_dir, self._root, self._vendors, self._may_open = cdi_dir, root, vendors, may_open
        self._chroot, self._generate_s = chroot, generate_s
        self._lock = threading.Lock()
        self._files: dict[str, tuple[FileVersion, Spec | None]] = {}
        self._generated: tuple[object, Source | None] = (None, None)
        """For which machine `nvidia-ctk` was started, and what it made."""
        self.text = ""
        """Where the last document came from, for the log."""

    def document(self, inventory: Inventory, aliases: Mapping[str, str] = cdi.NO_ALIASES) -> dict[str, Any]:
        """The specification as decoded JSON. `aliases` as `cdi.spec`."""
        with self._lock:
            root = self._root()
            own = cdi.spec(inventory, root, aliases)
            if not self._vendors:
                return self._chosen(own, "our own", "as it is set")
            wanted = _wanted(own, inventory, aliases)
            machine = Machine(inventory.driver, str(root.host), root.there)
            refused: list[str] = []
            for source in self._sources(root):
                if why := trouble(source.spec, wanted, machine):
                    refused.append(f"{source.name}: {why}")
                    continue
                return self._chosen(merged(source.spec, own, wanted), source.name, "; ".join(refused))
            return self._chosen(own, "our own", "; ".join(refused) or "there is none of NVIDIA's")

    def refresh(self, inventory: Inventory) -> None:
        """Have `nvidia-ctk` make one, where no file will do and the machine is another than it was. Blocks for `GENERATE_S` at most."""
        if not self._vendors or not inventory.gpus:
            return
        with self._lock:
            root = self._root()
            own = cdi.spec(inventory, root)
            wanted = _wanted(own, inventory, cdi.NO_ALIASES)
            machine = Machine(inventory.driver, str(root.host), root.there)
            key = (inventory.driver, root.host, tuple(one.name for one in wanted))
            if key == self._generated[0]:
                return
            if any(not trouble(source.spec, wanted, machine) for source in self._of_files(root)):
                return
        if self._may_open():
            made = self._generate(root)
            with self._lock:
                self._generated = (key, made)

    def stale(self) -> bool:
        """Did a file of NVIDIA's come, go or change since the last document?"""
        if not self._vendors:
            return False
        with self._lock:
            return self._versions(self._root()) != {name: version for name, (version, _) in self._files.items()}

    def _chosen(self, document: dict[str, Any], name: str, why: str) -> dict[str, Any]:
        text = f"{name} ({why})" if why else name
        if text != self.text:
            log.info("the CDI specification is made from", source=name, others=why)
        self.text = text
        return document

    def _sources(self, root: DriverRoot) -> Iterator[Source]:
        yield from self._of_files(root)
        if self._generated[1] is not None:
            yield self._generated[1]

    def _of_files(self, root: DriverRoot) -> Iterator[Source]:
        found = self._versions(root)
        before, self._files = self._files, {}
        for name, version in found.items():
            had = before.get(name)
            self._files[name] = had if had and had[0] == version else (version, _read(Path(name)))
        yield from (Source(name, spec) for name, (_, spec) in self._files.items() if spec is not None)

    def _versions(self, root: DriverRoot) -> dict[str, FileVersion]:
        found: dict[str, FileVersion] = {}
        folders = [self._cdi_dir, *([root.node / "etc/cdi", root.node / "var/run/cdi"] if root.node else [])]
        for folder in folders:
            try:
                names = sorted(path.name for path in folder.iterdir() if _VENDORS.match(path.name))[:MOST_FILES]
                for name in names:
                    if version := version_of(folder / name):
                        found.setdefault(str(folder / name), version)
            except OSError:
                continue  # no such folder, or not for us
        return found

    def _generate(self, root: DriverRoot) -> Source | None:
        """Where the node's / can be seen: the program needs the host's paths."""
        tool = next((path for path in TOOL_PATHS if root.node and (root.node / path).is_file()), None)
        if root.node is None or tool is None:
            return None
        command = [
            f"/{tool}", "cdi", "generate", "--format=json", "--device-name-strategy=uuid", f"--driver-root={root.host}",
            f"--dev-root={root.node_path('x').removesuffix('/dev/x') or '/'}",
        ]  # fmt: skip
        if root.node != NODE_ROOT:
            command = [self._chroot, str(root.node), *command]
        try:
            # GPU Operator's toolkit has the hook, which the specification names, beside the program
            output = output_of(command, self._generate_s, LARGEST_BYTES, f"/{tool}".rpartition("/")[0])
            return Source(f"/{tool}", spec_from_text(output))
        except (RunFailed, BadSpec) as error:
            log.warning("no CDI specification of NVIDIA's tool", program=f"/{tool}", error=str(error))
            return None


def _read(path: Path) -> Spec | None:
    try:
        with path.open("rb") as file:
            return spec_from_text(file.read(LARGEST_BYTES + 1))
    except (OSError, BadSpec) as error:
        log.warning("a CDI specification is not used", path=str(path), error=str(error))
        return None


def _wanted(own: Mapping[str, Any], inventory: Inventory, aliases: Mapping[str, str]) -> list[Wanted]:
    """Of our own specification: what NVIDIA's must describe. MIG instances that were made on demand are newer than any specification."""
    on_demand = {*aliases, *aliases.values()}
    of = {gpu.uuid: gpu for gpu in inventory.gpus}
    of |= {instance.uuid: gpu for gpu in inventory.gpus for instance in gpu.instances}
    found = []
    for device in own["devices"]:
        name, gpu = device["name"], of.get(device["name"])
        if gpu is None or name in on_demand or (gpu.on_demand and gpu.mig):
            continue
        optional = frozenset(f"/dev/{node}" for node in drm_nodes(bus_address(gpu.pci)))
        paths = [node["path"] for node in device["containerEdits"]["deviceNodes"]]
        found.append(Wanted(name, tuple(path for path in paths if path not in optional | COMMON), optional))
    return found

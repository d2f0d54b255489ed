"""Specifications of NVIDIA's, with the machine on which they are true."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from vgpu.api.cdi_spec import Spec, spec_from_text
from vgpu.api.cdi_vendor import Machine, Wanted

FOLDER: Final = Path(__file__).parent / "cdi"
GPU: Final = "GPU-224c6868-4065-4e03-b95e-5c9f0cbbd0ed"
OTHER: Final = "GPU-00000000-0000-0000-0000-00000000000b"
INSTANCES: Final = tuple(f"MIG-00000000-0000-0000-0000-00000000000{number}" for number in (1, 2))
DRIVER: Final = "580.65.06"
CAPS: Final = (
    ("/dev/nvidia-caps/nvidia-cap12", "/dev/nvidia-caps/nvidia-cap13"), ("/dev/nvidia-caps/nvidia-cap21", "/dev/nvidia-caps/nvidia-cap22"),
)  # fmt: skip


def everything(_: str) -> bool:
    return True


@dataclass(frozen=True)
class Case:
    """A file, and what is asked of it."""

    file: str
    root: str
    wanted: tuple[Wanted, ...]

    def text(self) -> bytes:
        return (FOLDER / self.file).read_bytes()

    def spec(self) -> Spec:
        return spec_from_text(self.text())

    def machine(self, exists: Callable[[str], bool | None] = everything, driver: str = DRIVER) -> Machine:
        return Machine(driver, self.root, exists)

    def own(self, *more: str) -> dict[str, Any]:
        """Our specification: with mounts that the vendor's replace, and with devices that it does not name."""
        nodes = {one.name: one.nodes for one in self.wanted} | dict.fromkeys(more, ("/dev/nvidia7",))
        return {
            "cdiVersion": "0.5.0", "kind": "tangram.sh/gpu",
            "devices": [{"name": name, "containerEdits": {"deviceNodes": self.nodes(paths)}} for name, paths in nodes.items()],
            "containerEdits": {
                "deviceNodes": self.nodes(("/dev/nvidiactl", "/dev/nvidia-uvm")),
                "mounts": [{"hostPath": "/ours/libcuda.so.1", "containerPath": "/usr/lib64/libcuda.so.1", "options": ["ro", "bind"]}],
            },
        }  # fmt: skip

    def nodes(self, paths: Sequence[str]) -> list[dict[str, Any]]:
        return [{"path": path, "hostPath": f"{self.root.rstrip('/')}{path}", "permissions": "rw"} for path in paths]


CASES: Final = {
    "host": Case("host.vendor.yaml", "/", (Wanted(GPU, ("/dev/nvidia0",)),)),
    "operator": Case("operator.vendor.yaml", "/run/nvidia/driver", (Wanted(GPU, ("/dev/nvidia0",)),)),
    "mig": Case(
        "mig.vendor.json", "/",
        tuple(
            Wanted(name, ("/dev/nvidia0", *caps), frozenset({"/dev/dri/card1", "/dev/dri/renderD129"}))
            for name, caps in zip(INSTANCES, CAPS, strict=True)
        ),
    ),
}  # fmt: skip

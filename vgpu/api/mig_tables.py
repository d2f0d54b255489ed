"""NVIDIA's MIG profiles by model: names, numbers, slices and placements, and every name that a driver may use.

Sources
    guide      NVIDIA MIG User Guide, "Supported MIG Profiles" (docs.nvidia.com/datacenter/tesla/mig-user-guide), R580 and R610: names, slices,
               engines, instances that fit; its "Getting Started" prints the placements of an A100
    lgipp      output of `nvidia-smi mig -lgipp`: placements. H100 NVL and RTX PRO 6000 as published by their users; H200 measured
    mig-parted NVIDIA's mig-parted, deployments/systemd/config-default.yaml: names and PCI device IDs
    operator   NVIDIA GPU Operator 25.10.0, release notes: names of B300
    playbook   NVIDIA DGX Station playbook "Multi-Instance GPU": names and numbers of GB300
    published  the placements that NVIDIA's DRA driver published on H100 80 GB and on B200, as captured by its users

go-nvml's test double of a B200 gives other placements (3g of three slices; 1g.45gb at each slice). They contradict `published`, and the
guide's "4 instances" of 1g.45gb, so they are not used here.

Where the placements of a model were not found, it has names only: a driver that is there reports its own (`nvml.mig`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from vgpu.api.mig import MigProfile, MigTable


@dataclass(frozen=True, slots=True)
class MigModel:
    """A model of GPU that has MIG."""

    title: str
    names: tuple[str, ...]
    """As NVML names the GPUs; compared whole."""
    table: MigTable
    source: str
    other_names: tuple[str, ...] = ()
    """Profiles under the names that other drivers compute for this model's memory."""

    @property
    def profiles(self) -> tuple[str, ...]:
        """Names of the table's profiles."""
        return tuple(profile.name for profile in self.table.profiles)


def _sevenths(gb: tuple[int, int, int, int], decoders: tuple[int, int, int, int, int, int, int]) -> MigTable:
    """Seven compute and eight memory slices. `gb`: of one, two, four and all memory slices; `decoders`: of each profile, in order."""
    one, two, four, all_ = gb
    every = tuple(range(7))
    return MigTable.of(
        (
            MigProfile(f"1g.{one}gb", 19, 1, 1, every, decoders[0]),
            MigProfile(f"1g.{one}gb.me", 20, 1, 1, every, decoders[1], 1),
            MigProfile(f"1g.{two}gb", 15, 1, 2, (0, 2, 4, 6), decoders[2]),
            MigProfile(f"2g.{two}gb", 14, 2, 2, (0, 2, 4), decoders[3]),
            MigProfile(f"3g.{four}gb", 9, 3, 4, (0, 4), decoders[4]),
            MigProfile(f"4g.{four}gb", 5, 4, 4, (0,), decoders[5]),
            MigProfile(f"7g.{all_}gb", 0, 7, 8, (0,), decoders[6], 1),
        )
    )


_AMPERE: Final = (0, 1, 1, 1, 2, 2, 5)
_HOPPER: Final = (1, 1, 1, 2, 3, 4, 7)
"""B200 as well: its guide writes 1 for each profile, its driver what Hopper has (published)."""

_A30: Final = MigTable.of(
    (
        MigProfile("1g.6gb", 14, 1, 1, (0, 1, 2, 3)),
        MigProfile("1g.6gb.me", 21, 1, 1, (0, 1, 2, 3), 1, 1),
        MigProfile("2g.12gb", 5, 2, 2, (0, 2), 2),
        MigProfile("2g.12gb.me", 6, 2, 2, (0, 2), 2, 1),
        MigProfile("4g.24gb", 0, 4, 4, (0,), 4, 1),
    )
)

_QUARTERS: Final = (0, 3, 6, 9)
_HALVES: Final = (0, 6)
_RTX_PRO_6000: Final = MigTable.of(
    (
        MigProfile("1g.24gb", 14, 1, 3, _QUARTERS, 1),
        MigProfile("1g.24gb.me", 21, 1, 3, _QUARTERS, 1, 1),
        MigProfile("1g.24gb.gfx", 47, 1, 3, _QUARTERS, 1),
        MigProfile("1g.24gb.me.all", 65, 1, 3, _QUARTERS, 4, 1),
        MigProfile("1g.24gb-me", 67, 1, 3, _QUARTERS),
        MigProfile("2g.48gb", 5, 2, 6, _HALVES, 2),
        MigProfile("2g.48gb.gfx", 35, 2, 6, _HALVES, 2),
        MigProfile("2g.48gb.me.all", 64, 2, 6, _HALVES, 4, 1),
        MigProfile("2g.48gb-me", 66, 2, 6, _HALVES),
        MigProfile("4g.96gb", 0, 4, 12, (0,), 4, 1),
        MigProfile("4g.96gb.gfx", 32, 4, 12, (0,), 4, 1),
    )
)

_NO_PLACEMENTS: Final = MigTable.of(())

MODELS: Final = (
    MigModel("A30", ("NVIDIA A30",), _A30, "guide"),
    MigModel(
        "A100 40 GB", ("NVIDIA A100-SXM4-40GB", "NVIDIA A100-PCIE-40GB", "NVIDIA A800-SXM4-40GB"), _sevenths((5, 10, 20, 40), _AMPERE), "guide"
    ),
    MigModel(
        "A100 80 GB",
        ("NVIDIA A100-SXM4-80GB", "NVIDIA A100 80GB PCIe", "NVIDIA A800-SXM4-80GB", "NVIDIA A800 80GB PCIe"),
        _sevenths((10, 20, 40, 80), _AMPERE),
        "guide",
    ),
    MigModel(
        "H100 80 GB", ("NVIDIA H100 80GB HBM3", "NVIDIA H100 PCIe", "NVIDIA H800"), _sevenths((10, 20, 40, 80), _HOPPER), "guide, published"
    ),
    MigModel(
        "H100 94 GB", ("NVIDIA H100 NVL", "NVIDIA H100 94GB HBM2e", "NVIDIA H800 NVL"), _sevenths((12, 24, 47, 94), _HOPPER), "guide, lgipp",
        ("1g.11gb", "1g.11gb.me", "1g.22gb", "2g.22gb", "3g.44gb", "4g.44gb", "7g.88gb"),
    ),
    MigModel("H100 96 GB", ("NVIDIA GH200 480GB", "NVIDIA H20", "NVIDIA H100 96GB HBM3"), _sevenths((12, 24, 48, 96), _HOPPER), "guide"),
    MigModel(
        "H200", ("NVIDIA H200", "NVIDIA H200 NVL"), _sevenths((18, 35, 71, 141), _HOPPER), "guide, measured",
        (
            "1g.16gb", "1g.16gb.me", "1g.32gb", "2g.32gb", "2g.33gb", "3g.66gb", "3g.69gb", "4g.66gb", "4g.69gb",
            "7g.136gb", "7g.140gb", "7g.142gb",
        ),
    ),
    MigModel("GH200 144 GB", ("NVIDIA GH200 144G HBM3e",), _sevenths((18, 36, 72, 144), _HOPPER), "mig-parted"),
    MigModel("B200", ("NVIDIA B200",), _sevenths((23, 45, 90, 180), _HOPPER), "guide, published"),
    MigModel(
        "GB200", ("NVIDIA GB200",), _sevenths((24, 47, 95, 189), _HOPPER), "mig-parted",
        ("1g.23gb", "1g.23gb.me", "3g.93gb", "4g.93gb", "7g.186gb"),
    ),
    MigModel("B300", ("NVIDIA B300 SXM6 AC",), _sevenths((34, 67, 135, 269), _HOPPER), "operator; placements guessed: those of B200"),
    MigModel("GB300", ("NVIDIA GB300",), _sevenths((35, 70, 139, 278), _HOPPER), "playbook; placements guessed: those of B200"),
    MigModel(
        "RTX PRO 6000",
        (
            "NVIDIA RTX PRO 6000 Blackwell Server Edition",
            "NVIDIA RTX PRO 6000 Blackwell Workstation Edition",
            "NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition",
        ),
        _RTX_PRO_6000,
        "guide, lgipp",
    ),
    MigModel(
        "RTX PRO 5000", (), _NO_PLACEMENTS, "guide, R580 and R610; no placements found",
        (
            "1g.12gb", "1g.12gb.me", "1g.12gb.gfx", "1g.12gb-me", "2g.24gb-me", "4g.48gb", "4g.48gb.gfx",
            "1g.24gb", "1g.24gb.me", "1g.24gb.gfx", "1g.24gb.me.all", "1g.24gb-me", "2g.48gb", "2g.48gb.gfx",
        ),
    ),
    MigModel(
        "RTX PRO 4500", (), _NO_PLACEMENTS, "guide, R610; no placements found",
        ("1g.16gb", "1g.16gb.gfx", "1g.16gb.me.all", "1g.16gb-me", "2g.32gb", "2g.32gb.gfx"),
    ),
)  # fmt: skip
"""By architecture. Names of GPUs where guessed after their siblings': A800, H800, H100 94 and 96 GB."""


_BY_NAME: Final = {name: model for model in MODELS for name in model.names}


def model_of(gpu_name: str) -> MigModel | None:
    """The model of a GPU that NVML names so; None = it has no MIG, or is not known here."""
    return _BY_NAME.get(gpu_name)


def known_profiles() -> tuple[str, ...]:
    """Every name that pods may request by default, each once, by model and slices."""
    return tuple(dict.fromkeys(name for model in MODELS for name in (*model.profiles, *model.other_names)))

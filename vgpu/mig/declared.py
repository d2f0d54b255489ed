"""A node's declared MIG configuration: which one its labels name, and what can be done now to have it.

Pure: it reads labels and what the GPUs are, and answers with plans. A configuration that some GPU can never have is refused whole, before anything is
changed. A GPU that is in use waits; the others do not wait for it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Final, Literal

from vgpu.api.mig import MigSlot
from vgpu.api.names import Names
from vgpu.mig.config import MigEntry
from vgpu.mig.plan import GpuPlan, GpuState, plan

NVIDIA: Final = "nvidia.com/mig.config"
"""The label that NVIDIA's MIG manager reads. Specified by the GPU Operator."""
NVIDIA_STATE: Final = "nvidia.com/mig.config.state"
"""What NVIDIA's MIG manager writes: pending, rebooting, success or failed. Specified by the GPU Operator."""
AT_WORK: Final = frozenset({"pending", "rebooting"})

State = Literal["success", "pending", "failed"]
"""Of a node's configuration, as its label says it; the words of NVIDIA's MIG manager."""

ON_DEMAND: Final = "a MIG instance on demand"
MODE_STAYS: Final = (
    "its MIG mode is {}, must be {}: run `tangramctl mig apply` on the node, or set node.migModeIdleSeconds"
)


@dataclass(frozen=True, slots=True)
class Choice:
    """What the labels of a node say."""

    name: str = ""
    """Of the configuration; empty: none is declared, or not now."""
    label: str = ""
    """The key that names it."""
    hold: str = ""
    """Why nothing may be touched now, for a person."""
    bad: str = ""
    """Why the labels cannot be followed, for a person."""

    @property
    def written(self) -> str:
        """Label and value, for a person."""
        return f"{self.label}={self.name}"


def label_keys(names: Names) -> tuple[str, ...]:
    """Of the labels that `chosen` reads."""
    return names.mig_config, NVIDIA, NVIDIA_STATE


def chosen(labels: Mapping[str, str], names: Names) -> Choice:
    """The configuration that these labels of a node name. Ours counts; NVIDIA's where ours is absent."""
    ours, theirs = labels.get(names.mig_config), labels.get(NVIDIA)
    if ours is None and theirs is None:
        return Choice()
    if ours is not None and theirs is not None and ours != theirs:
        return Choice(
            bad=f"label {names.mig_config} is {ours!r} and label {NVIDIA} is {theirs!r}: they must be the same, or one of them must go"
        )
    label, name = (names.mig_config, ours) if ours is not None else (NVIDIA, theirs or "")
    if not name:
        return Choice(bad=f"label {label} is empty: it must name a configuration")
    state = labels.get(NVIDIA_STATE, "")
    if state in AT_WORK:
        return Choice(name, label, hold=f"NVIDIA's MIG manager is at work: label {NVIDIA_STATE} is {state!r}")
    return Choice(name, label)


@dataclass(frozen=True, slots=True)
class NodePlan:
    """For the GPUs of a node. If `failed` is set, nothing else is."""

    apply: tuple[GpuPlan, ...] = ()
    """What can be done now, with MIG mode as it is."""
    switch: tuple[GpuPlan, ...] = ()
    """What needs another MIG mode: for a GPU that is idle for long."""
    waiting: Mapping[str, str] = field(default_factory=dict)
    """UUID -> why it has to wait, for a person."""
    drains: frozenset[str] = frozenset()
    """UUIDs of those that wait until instances in use are free, with MIG mode as it is: new pods would prolong that."""
    failed: str = ""
    """Why the configuration can never be had, for a person."""

    @property
    def done(self) -> bool:
        """Is everything as declared?"""
        return not (self.apply or self.switch or self.waiting or self.failed)


def plan_node(wanted: Iterable[tuple[GpuState, MigEntry]], out: Mapping[str, str]) -> NodePlan:
    """Plans for GPUs, and what each should have. `out`: UUID -> why this one is not touched now, for a person."""
    apply: list[GpuPlan] = []
    switch: list[GpuPlan] = []
    failed: list[str] = []
    waiting: dict[str, str] = {}
    drains: set[str] = set()
    for state, entry in wanted:
        found = plan(state, entry.mig, entry.counts)
        if found.refused:
            if never := plan(_idle(state), entry.mig, entry.counts).refused:
                failed.append(never)
            else:
                waiting[state.uuid] = found.refused
                drains |= {state.uuid} if state.mig == entry.mig and state.uuid not in out else set()
        elif not found.changes:
            continue
        elif state.uuid in out:
            waiting[state.uuid] = f"GPU {state.index} ({state.uuid}): {out[state.uuid]}"
        else:
            (apply if found.mode is None else switch).append(found)
    if failed:
        return NodePlan(failed="; ".join(failed))
    return NodePlan(tuple(apply), tuple(switch), waiting, frozenset(drains))


def _idle(state: GpuState) -> GpuState:
    """The same GPU when nobody uses it any more."""
    return replace(state, in_use="", instances=tuple(replace(one, in_use="") for one in state.instances))


def beside_on_demand(state: GpuState, entry: MigEntry, slots: Collection[MigSlot], *, enabled: bool) -> GpuState:
    """The GPU as its declared configuration concerns it. `slots`: where Tangram made an instance on demand, or is to make one again.

    MIG mode without instances, on a node that makes them on demand, leaves these to the pods. In any other configuration they are in use until they
    are removed, which MIG on demand does when they are idle.
    """
    if not slots:
        return state
    if enabled and entry.mig and not entry.counts:
        return replace(state, instances=tuple(one for one in state.instances if one.slot not in slots))
    instances = tuple(
        replace(one, in_use=one.in_use or ON_DEMAND) if one.slot in slots else one for one in state.instances
    )
    return replace(state, instances=instances)


def mode_words(found: GpuPlan) -> str:
    """Why a GPU whose MIG mode differs is left as it is, where it is not to be switched."""
    return f"GPU {found.index} ({found.uuid}): " + MODE_STAYS.format(*(("off", "on") if found.mode else ("on", "off")))

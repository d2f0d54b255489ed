"""Does a node's container runtime carry out CDI devices, by the name and version that its kubelet reports? Pure.

Access mode `cdi` depends on it: a runtime that has CDI switched off starts the container all the same, without its devices, and reports nothing.
So a version alone says for containerd 1.7 that a setting decides; whether it is set, only a container that was started shows (`deviceplugin.gpus.cdi_check`).

Sources, read only: containerd 1.7 has `enable_cdi`, off by default (its pull request 6654); it is on by default from 2.0 (9621). CRI-O has CDI since 1.23
(its pull request 5571), on by default, and is released with each Kubernetes. cri-dockerd passes CDI devices on since its pull request 522; the kubelet reports Docker's version there, not cri-dockerd's.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

LONGEST: Final = 128
"""Characters of a version that are read. Guessed: the longest known one has 30."""


class CdiSupport(StrEnum):
    """What a version says about CDI devices."""

    ON = "on"
    SETTING = "setting"
    """Off by default: `enable_cdi = true` switches it on."""
    NONE = "none"
    UNKNOWN = "unknown"
    """Only a container that was started shows it."""


@dataclass(frozen=True, slots=True)
class RuntimeRow:
    """A row of docs/operations/cdi.md."""

    runtime: str
    versions: str
    support: CdiSupport
    do: str


SETTING_TEXT: Final = 'set `enable_cdi = true` under `[plugins."io.containerd.grpc.v1.cri"]` in containerd\'s configuration and restart containerd, or use `accessMode=nvidia`'

TABLE: Final = (
    RuntimeRow("containerd", "2.0 and newer", CdiSupport.ON, "nothing; `enable_cdi` is on by default"),
    RuntimeRow("containerd", "1.7", CdiSupport.SETTING, SETTING_TEXT),
    RuntimeRow("containerd", "1.6 and older", CdiSupport.NONE, "upgrade containerd, or use `accessMode=nvidia`"),
    RuntimeRow("CRI-O", "1.23 and newer", CdiSupport.ON, "nothing; it is always on"),
    RuntimeRow("CRI-O", "1.22 and older", CdiSupport.NONE, "upgrade CRI-O"),
    RuntimeRow("Docker by cri-dockerd", "each", CdiSupport.UNKNOWN, "start a pod with a share, and look at the node's Events"),
    RuntimeRow("another", "each", CdiSupport.UNKNOWN, "start a pod with a share, and look at the node's Events"),
)  # fmt: skip

SAID: Final = {
    CdiSupport.ON: "on", CdiSupport.SETTING: "**off by default**", CdiSupport.NONE: "**no**", CdiSupport.UNKNOWN: "not known from the version",
}  # fmt: skip

_ON_FROM: Final = {"containerd": (2, 0), "cri-o": (1, 23)}
_SETTING_FROM: Final = {"containerd": (1, 7)}
_VERSION: Final = re.compile(r"([a-z-]+)://v?([0-9]{1,6})\.([0-9]{1,6})")


def cdi_support(version: str) -> CdiSupport:
    """Of a `status.nodeInfo.containerRuntimeVersion`, as `containerd://1.7.27` or `containerd://2.1.5-k3s1`."""
    found = _VERSION.match(version[:LONGEST])
    if found is None or found[1] not in _ON_FROM:
        return CdiSupport.UNKNOWN
    name, number = found[1], (int(found[2]), int(found[3]))
    if number == (0, 0):
        return CdiSupport.UNKNOWN  # a build without a version
    if number >= _ON_FROM[name]:
        return CdiSupport.ON
    return CdiSupport.SETTING if number >= _SETTING_FROM.get(name, _ON_FROM[name]) else CdiSupport.NONE


def shown(version: str) -> str:
    """For a sentence: `containerd 1.7.27`."""
    name, _, number = version[:LONGEST].partition("://")
    return f"{name} {number}".strip() or "the container runtime"


def page() -> str:
    """The table of docs/operations/cdi.md."""
    rows = [f"| {row.runtime} | {row.versions} | {SAID[row.support]} | {row.do} |" for row in TABLE]
    return "\n".join(("| runtime | version | CDI devices | what to do |", "|---|---|---|---|", *rows))

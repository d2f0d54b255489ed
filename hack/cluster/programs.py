"""Which programs the cluster is made of, and how each is built.

Versions are not written here: each module's go.mod and go.sum pin them. This module reads the one that has to be stamped
into the Kubernetes binary, and hashes what a result depends on, so that a result can be kept.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final

SOURCES: Final = Path(__file__).parent / "go"


@dataclass(frozen=True, slots=True)
class Module:
    """A Go module under `go/` and the programs that come out of it.

    `packages` are import paths, one program each, named by the last element unless that is a version; `links` are further
    names under which the first program is called.
    """

    name: str
    packages: tuple[str, ...] = (".",)
    links: tuple[str, ...] = ()
    tags: tuple[str, ...] = ()
    cgo: bool = False
    stamp: tuple[str, ...] = ()

    @property
    def folder(self) -> Path:
        return SOURCES / self.name

    @property
    def programs(self) -> tuple[str, ...]:
        """File names of the results."""
        if len(self.packages) == 1:
            return (self.name,)
        return tuple(package.rpartition("/")[2] for package in self.packages)


KUBERNETES: Final = Module(
    "kubernetes",
    links=("kube-apiserver", "kube-controller-manager", "kube-proxy", "kube-scheduler", "kubectl", "kubelet"),
    stamp=("k8s.io/component-base/version", "k8s.io/client-go/pkg/version"),
)
ETCD: Final = Module("etcd", ("go.etcd.io/etcd/server/v3",))
_CONTAINERD: Final = "github.com/containerd/containerd/v2/cmd"
CONTAINERD: Final = Module(
    "containerd",
    (f"{_CONTAINERD}/containerd", f"{_CONTAINERD}/containerd-shim-runc-v2", f"{_CONTAINERD}/ctr"),
    tags=("no_btrfs", "no_devmapper", "no_zfs"),
)
_TOOLKIT: Final = "github.com/NVIDIA/nvidia-container-toolkit/cmd"
TOOLKIT: Final = Module(
    "toolkit",
    (
        f"{_TOOLKIT}/nvidia-container-runtime",
        f"{_TOOLKIT}/nvidia-container-runtime-hook",
        f"{_TOOLKIT}/nvidia-ctk",
        f"{_TOOLKIT}/nvidia-cdi-hook",
    ),
    cgo=True,
)
PAUSE: Final = Module("pause")
HELM: Final = Module("helm", ("helm.sh/helm/v3/cmd/helm",))
KWOK: Final = Module("kwok", ("sigs.k8s.io/kwok/cmd/kwok",))
KIND: Final = Module("kind", ("sigs.k8s.io/kind",))
POD_REQUESTS: Final = Module("podrequests")
"""No program of a cluster: the requests of pods as Kubernetes itself counts them, for a test to compare with."""
KUBECONFORM: Final = Module("kubeconform", ("github.com/yannh/kubeconform/cmd/kubeconform",))
KUBE_SCORE: Final = Module("kubescore", ("github.com/zegl/kube-score/cmd/kube-score",))
"""Nor are these: what checks the chart's objects, by the API server's schemas and by rules of good practice."""
ACTIONLINT: Final = Module("actionlint", ("github.com/rhysd/actionlint/cmd/actionlint",))
"""Checks the workflows of .github/."""
COSIGN: Final = Module("cosign", ("github.com/sigstore/cosign/v3/cmd/cosign",))
"""Signs what is released. Two and a half minutes on two cores from nothing, so a release builds it and no test."""

CLUSTER: Final = (KUBERNETES, ETCD, CONTAINERD, PAUSE, TOOLKIT, HELM)
"""What `up` needs, the longest build first."""


ALL: Final = (*CLUSTER, KWOK, KIND, POD_REQUESTS, KUBECONFORM, KUBE_SCORE, ACTIONLINT, COSIGN)
"""With what only some want: simulated nodes by the thousand, clusters in Docker, programs of tests and of a release."""


def kubernetes_version() -> str:
    """As in the module file, with the leading v."""
    text = (KUBERNETES.folder / "go.mod").read_text()
    found = re.search(r"^\s*(?:require )?k8s\.io/kubernetes (v\d+\.\d+\.\d+)$", text, re.MULTILINE)
    if found is None:
        raise LookupError(f"{KUBERNETES.folder / 'go.mod'}: no requirement k8s.io/kubernetes vX.Y.Z")
    return found[1]


def linker_flags(module: Module, version: str) -> str:
    """Flags for `go build -ldflags`. Helm and kubectl compare the stamped version with what they support."""
    major, minor, _ = version.removeprefix("v").split(".")
    values = {"gitVersion": version, "gitMajor": major, "gitMinor": minor, "gitTreeState": "clean"}
    stamps = [f"-X {package}.{key}={value}" for package in module.stamp for key, value in values.items()]
    return " ".join(["-s -w", *stamps])


def module_key(module: Module, linker: str) -> str:
    """16 hex digits over everything that the results depend on, except the compiler."""
    digest = hashlib.sha256(repr((module.packages, module.tags, module.cgo, linker)).encode())
    for source in sorted(module.folder.iterdir()):
        digest.update(source.name.encode() + b"\0" + source.read_bytes() + b"\0")
    return digest.hexdigest()[:16]

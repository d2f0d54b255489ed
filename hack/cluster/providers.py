"""Which cluster is meant: our own, kind's, or one that is there already.

`local` is this package's. `kind` serves where Docker answers (the kind command is built from its Go module). `existing`
is whatever KUBECONFIG names: it is used, never changed, and images have to reach it by its own means.
The choice is written to the state folder, so that `down` and `load` do the right thing.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from hack.cluster import down as local_down
from hack.cluster import images, status
from hack.cluster.build import build, link_programs
from hack.cluster.caller import own_by_person
from hack.cluster.console import Steps
from hack.cluster.docker import docker, docker_answers
from hack.cluster.layout import Layout, cache_folder
from hack.cluster.programs import HELM, KIND, KUBERNETES
from hack.cluster.up import bring_up

NAMES: Final = ("local", "kind", "existing")
KIND_CLUSTER: Final = "tangram"
KIND_IMAGE: Final = "TANGRAM_KIND_IMAGE"
"""Environment variable: the node image, where kind's own is not to be had or another Kubernetes is wanted."""


def chosen(layout: Layout) -> str | None:
    """The provider of the cluster that is up."""
    try:
        return layout.provider.read_text().strip()
    except FileNotFoundError:
        return None


def up(layout: Layout, provider: str | None, nodes: int, steps: Steps, *, replace: bool = False) -> None:
    """`replace`: a cluster of another provider is taken down first."""
    provider = provider or chosen(layout) or ("kind" if docker_answers() else "local")
    current = chosen(layout)
    if current not in {None, provider}:
        if not replace:
            raise ValueError(
                f"provider: {provider} requested, but the cluster in {layout.state} is {current}'s; take it down first: make cluster-down"
            )
        down(layout, steps)
    match provider:
        case "local":
            bring_up(layout, nodes, steps)
        case "kind":
            _kind_up(layout, nodes, steps)
        case "existing":
            _existing_up(layout, steps)
    status.say_ready(layout, steps)


def down(layout: Layout, steps: Steps) -> None:
    match chosen(layout):
        case "kind":
            with steps.step("delete the kind cluster"):
                _kind(layout, "delete", "cluster", "--name", KIND_CLUSTER, "--kubeconfig", str(layout.kubeconfig))
            shutil.rmtree(layout.state)
        case "existing":
            shutil.rmtree(layout.state)
            steps.print("the cluster itself was there before and stays")
        case _:
            local_down.take_down(layout, steps)


def load(layout: Layout, archives: Sequence[Path], steps: Steps) -> None:
    """Bring the archives, or with none named the images that were built last, into the cluster."""
    for archive in archives or images.current():
        if not archive.is_file():
            raise FileNotFoundError(f"{archive}: no such image archive")
        with steps.step(f"load {archive.name}"):
            match chosen(layout):
                case "kind":
                    _kind(layout, "load", "image-archive", str(archive), "--name", KIND_CLUSTER)
                case "existing":
                    raise RuntimeError(f"{archive}: push it to a registry that your cluster pulls from")
                case _:
                    images.load(layout, archive)


def kubeconfig(layout: Layout) -> Path:
    if not layout.kubeconfig.exists():
        raise LookupError(f"cluster in {layout.state}: not up")
    return layout.kubeconfig


def kind_settings(nodes: int, *, cgroups: str) -> dict[str, object]:
    """The configuration of `kind create`, v1alpha4. `cgroups`: Docker's version of them.

    No patch of containerd's configuration: containerd 2, which kind's node images have, knows CDI by itself.
    """
    roles = ["control-plane", *["worker"] * (nodes - 1)]
    settings: dict[str, object] = {
        "kind": "Cluster",
        "apiVersion": "kind.x-k8s.io/v1alpha4",
        "nodes": [{"role": role} for role in roles],
    }
    if cgroups == "1":  # the kubelet refuses these unless it is configured
        kubelet = {"kind": "KubeletConfiguration", "apiVersion": "kubelet.config.k8s.io/v1beta1", "failCgroupV1": False}
        settings["kubeadmConfigPatches"] = [json.dumps(kubelet)]
    return settings


def _kind(layout: Layout, *arguments: str) -> None:
    """It prints itself what it does, and what is wrong."""
    if code := subprocess.run([str(layout.bin / "kind"), *arguments], check=False).returncode:
        raise RuntimeError(f"kind {' '.join(arguments[:2])}: ended with {code}")


def _tools(layout: Layout, steps: Steps, *, kind: bool) -> None:
    modules = (KUBERNETES, HELM, KIND) if kind else (KUBERNETES, HELM)
    programs = build(cache_folder(), modules, steps)
    wanted = {"kubectl", "helm", "kind"}
    layout.state.mkdir(parents=True, exist_ok=True)
    link_programs({name: path for name, path in programs.items() if name in wanted}, layout.bin)


def _kind_up(layout: Layout, nodes: int, steps: Steps) -> None:
    if not docker_answers():
        raise RuntimeError("provider kind: Docker does not answer (docker info)")
    _tools(layout, steps, kind=True)
    layout.provider.write_text("kind\n")
    ours = ["--kubeconfig", str(layout.kubeconfig)]  # kind would write to the person's own and switch its context
    known = subprocess.run([str(layout.bin / "kind"), "get", "clusters"], capture_output=True, text=True, check=True)
    if KIND_CLUSTER not in known.stdout.split():
        settings = layout.state / "kind.yaml"
        settings.write_text(json.dumps(kind_settings(nodes, cgroups=docker("info", "--format", "{{.CgroupVersion}}"))))
        image = ["--image", os.environ[KIND_IMAGE]] if os.environ.get(KIND_IMAGE) else []
        with steps.step("create the kind cluster"):
            _kind(
                layout,
                "create",
                "cluster",
                "--name",
                KIND_CLUSTER,
                "--config",
                str(settings),
                *image,
                "--wait",
                "180s",
                *ours,
            )
    _kind(layout, "export", "kubeconfig", "--name", KIND_CLUSTER, *ours)
    own_by_person(layout.kubeconfig)
    layout.state.chmod(0o755)


def _existing_up(layout: Layout, steps: Steps) -> None:
    named = os.environ.get("KUBECONFIG", "")
    if not named or not Path(named).is_file():
        raise ValueError(f"KUBECONFIG: {named or 'empty'} is not a file; name the kubeconfig of the existing cluster")
    _tools(layout, steps, kind=False)
    layout.provider.write_text("existing\n")
    if Path(named).resolve() != layout.kubeconfig:
        shutil.copyfile(named, layout.kubeconfig)
        layout.kubeconfig.chmod(0o600)
        own_by_person(layout.kubeconfig)
        layout.state.chmod(0o755)
    kubectl = [str(layout.bin / "kubectl"), "--kubeconfig", str(layout.kubeconfig)]
    with steps.step(f"reach the cluster of {named}"):
        subprocess.run([*kubectl, "get", "--raw", "/readyz"], check=True, capture_output=True, timeout=30)

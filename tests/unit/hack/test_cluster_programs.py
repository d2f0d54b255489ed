"""What is built, and when a kept result is good."""

import re
import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest

from hack.cluster import toolchain
from hack.cluster.build import link_programs
from hack.cluster.programs import (
    CLUSTER,
    ETCD,
    HELM,
    KIND,
    KUBE_SCORE,
    KUBECONFORM,
    KUBERNETES,
    KWOK,
    Module,
    kubernetes_version,
    linker_flags,
    module_key,
)


def test_every_module_has_its_sums_beside_it() -> None:
    for module in (*CLUSTER, KIND, KWOK, KUBECONFORM, KUBE_SCORE):
        text = (module.folder / "go.mod").read_text()
        assert (module.folder / "go.sum").exists() or "require" not in text, module.name
        for package in module.packages:
            assert package == "." or package in text, package


def versions(module: Module, pattern: str) -> dict[str, str]:
    """Path -> version of the lines of a go.mod that match; the pattern has both as groups."""
    return dict(re.findall(pattern, (module.folder / "go.mod").read_text(), re.MULTILINE))


def test_helm_is_built_from_the_versions_that_kubernetes_is_built_from() -> None:
    """So that they share what is compiled; `hack/update-helm` makes it so."""
    required, replaced = r"^(?:require )?\t?(\S+) (v\S+)(?: // indirect)?$", r"^(?:replace |\t)(\S+) => \S+ (v\S+)$"
    theirs = versions(KUBERNETES, required) | versions(KUBERNETES, replaced)
    helms = versions(HELM, required) | versions(HELM, replaced)
    both = theirs.keys() & helms.keys()
    assert "k8s.io/client-go" in both
    assert {path: helms[path] for path in both} == {path: theirs[path] for path in both}


def test_programs_are_named_as_they_are_called() -> None:
    assert ETCD.programs == ("etcd",)
    assert "containerd-shim-runc-v2" in {name for module in CLUSTER for name in module.programs}
    assert {"kubelet", "kubectl"} <= set(KUBERNETES.links)


def test_the_binary_is_stamped_with_the_version_of_the_module() -> None:
    flags = linker_flags(KUBERNETES, "v1.36.3")
    assert "-X k8s.io/component-base/version.gitVersion=v1.36.3" in flags
    assert "-X k8s.io/client-go/pkg/version.gitMinor=36" in flags
    assert kubernetes_version().startswith("v1.36.")
    assert linker_flags(ETCD, "v1.36.3") == "-s -w"


@dataclass(frozen=True, slots=True)
class Copied(Module):
    at: Path = Path()

    @property
    def folder(self) -> Path:
        return self.at


def test_a_changed_source_or_flag_is_another_result(tmp_path: Path) -> None:
    shutil.copytree(KUBERNETES.folder, tmp_path / "go")
    module = Copied("kubernetes", at=tmp_path / "go")
    first = module_key(module, "-s")
    assert module_key(module, "-s") == first
    assert module_key(module, "-w") != first
    (tmp_path / "go" / "main.go").write_text("package main\n")
    assert module_key(module, "-s") != first


def test_a_compiler_reports_its_version_in_any_form() -> None:
    assert toolchain.go_version("go version go1.26.8 linux/amd64") == (1, 26)
    assert toolchain.go_version("go version go1.19 linux/amd64") == (1, 19)
    assert toolchain.go_version("command not found") is None


def test_links_of_programs_that_are_no_more_go_away(tmp_path: Path) -> None:
    link_programs({"a": Path("/x/a"), "b": Path("/x/b")}, tmp_path)
    link_programs({"b": Path("/y/b")}, tmp_path)
    assert {link.name: link.readlink() for link in tmp_path.iterdir()} == {"b": Path("/y/b")}


def test_more_nodes_than_a_machine_carries_are_refused(tmp_path: Path) -> None:
    from hack.cluster.console import Steps
    from hack.cluster.layout import Layout
    from hack.cluster.up import bring_up

    with pytest.raises(ValueError, match="33 requested, 1 to 32"):
        bring_up(Layout(tmp_path), 33, Steps(quiet=True))

"""Where templates are not normalised, bytes in them are denied, with the number to write."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hack.cluster.build import build
from hack.cluster.console import Steps
from hack.cluster.layout import cache_folder
from hack.cluster.programs import ETCD, KUBERNETES
from tests.apiserver import ApiServer, running
from tests.contract.chart.policy_kit import refused
from tests.contract.chart.rendering import Helm
from tests.contract.chart.templates_kit import (
    ADMISSION,
    JOB,
    KINDS,
    Counted,
    container,
    create,
    in_force,
    pod_template,
    thing,
)

each_kind = pytest.mark.parametrize("of", KINDS, ids=lambda of: of.kind)


@pytest.fixture(
    scope="module", params=[{"queues": {"kueue": {"templates": "deny"}}}, "1.35"], ids=["deny", "before 1.36"]
)
def denying(request: pytest.FixtureRequest, kinds: ApiServer, helm: Helm) -> Iterator[ApiServer]:
    values, kube = ({}, f"v{request.param}.4") if isinstance(request.param, str) else (request.param, "")
    with in_force(kinds, helm, values, kube=kube):
        yield kinds


@each_kind
def test_bytes_are_denied_with_the_number_to_write(denying: ApiServer, of: Counted) -> None:
    for at in range(len(of.templates)):
        templates = [pod_template(container("main", "8"))] * len(of.templates)
        templates[at] = pod_template(container("main", "8"), container("side", "7.5Gi"))
        message = refused(lambda templates=templates: create(denying, of, thing(of, *templates)))
        assert (
            "container side: tangram.sh/gpu-mem is 7680Mi, and Kueue counts bytes as units of 1Gi: write 8"
            in message.replace("7.5Gi", "7680Mi")
        )
    init = pod_template(container("main"), init=(container("first", "9Gi", "9Gi"),))
    assert "container first" in refused(lambda: create(denying, of, thing(of, init)))
    create(denying, of, thing(of, pod_template(container("main", "8", "8"))))
    create(denying, of, thing(of, pod_template(container("main", "8Gi")), queue=""))


def test_an_api_server_of_before_takes_the_policies_and_denies(helm: Helm, tmp_path: Path) -> None:
    """The oldest version that this one emulates. It compiles with the CEL of one version earlier, and serves no policy that changes objects."""
    programs = build(cache_folder(), [KUBERNETES, ETCD], Steps())
    with running(programs, tmp_path, "--emulated-version=1.33") as old, in_force(old, helm, kube="v1.33.4"):
        assert old.http.get(f"{ADMISSION}/mutatingadmissionpolicies").status_code == 404
        job = thing(JOB, pod_template(container("main", "8Gi")))
        assert "container main: tangram.sh/gpu-mem is 8Gi" in refused(lambda: create(old, JOB, job))
        create(old, JOB, thing(JOB, pod_template(container("main", "8"))))


SERVED = "admissionregistration.k8s.io/v1/MutatingAdmissionPolicy"


@pytest.mark.parametrize(
    ("values", "kube", "served", "kinds"),
    [
        ({}, "v1.36.0", (), len(KINDS)),
        ({}, "v1.36.0-gke.2", (), len(KINDS)),
        ({}, "v1.36.1", ("v1/Pod", SERVED), len(KINDS)),
        ({}, "v1.36.1", ("v1/Pod",), 0),
        ({}, "v1.35.9", (), 0),
        ({"queues": {"kueue": {"templates": "deny"}}}, "v1.36.0", (), 0),
    ],
)
def test_templates_are_normalised_where_the_api_server_can(
    helm: Helm, values: dict[str, Any], kube: str, served: tuple[str, ...], kinds: int
) -> None:
    """By its version, or by what it serves where helm has read that. The policy that denies is there in any case."""
    text = helm.text(values, kube=kube, served=served)
    assert (
        text.count("kind: MutatingAdmissionPolicy\n") == text.count("kind: MutatingAdmissionPolicyBinding\n") == kinds
    )
    assert "name: tangram-templates\n" in text


def test_without_policies_there_is_none_on_templates(helm: Helm) -> None:
    assert "tangram-templates" not in helm.text({"policy": {"enabled": False}})

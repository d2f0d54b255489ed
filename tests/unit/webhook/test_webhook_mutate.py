"""Admission as properties: what is true of every pod that could be sent."""

from __future__ import annotations

import base64
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.contract.webhook.pairs import applied
from tests.examples import examples
from vgpu.api.contract import CONTAINER_LIBRARY
from vgpu.api.errors import BadRequest
from vgpu.api.request import pod_request
from vgpu.scheduling.policies.registry import POLICIES
from webhook.admission_rules import AdmissionRules
from webhook.mutate import mutate
from webhook.review import BadReview, review
from webhook.settings import Settings

GPU_MEM, GPU_CORE = "tangram.sh/gpu-mem", "tangram.sh/gpu-core"

quantities = st.sampled_from(
    [
        "0",
        "1",
        "8",
        "8Gi",
        "1500Mi",
        "-1",
        "0.5",
        "3e1",
        "1Pi",
        "1Ei",
        "9e18",
        "1e99",
        "8gb",
        "",
        "100",
        "130",
        "1048576",
        "1Ti",
    ]
)
environments = st.lists(
    st.fixed_dictionaries(
        {"name": st.sampled_from(["A", "LD_PRELOAD", "NVIDIA_VISIBLE_DEVICES", "TANGRAM_GPUS"])},
        optional={
            "value": st.sampled_from(["", "all", "void", "/x.so", CONTAINER_LIBRARY, f"{CONTAINER_LIBRARY}:/x.so"]),
            "valueFrom": st.just({"fieldRef": {"fieldPath": "metadata.annotations['tangram.sh/gpus.c0']"}}),
        },
    ),
    max_size=3,
)
resources = st.dictionaries(
    st.sampled_from(
        [GPU_MEM, GPU_CORE, "tangram.sh/gpu", "tangram.sh/mig-1g.10gb", "tangram.sh/x", "cpu", "nvidia.com/gpu"]
    ),
    quantities,
    max_size=2,
)


@st.composite
def containers(draw: st.DrawFn) -> dict[str, Any]:
    limits = draw(st.one_of(st.just({GPU_MEM: "8Gi"}), resources))
    container: dict[str, Any] = {"resources": {"limits": limits}}
    if draw(st.booleans()):
        container["resources"]["requests"] = dict(limits)
    if draw(st.booleans()):
        container["env"] = draw(environments)
    return container


@st.composite
def pods(draw: st.DrawFn) -> dict[str, Any]:
    app, init = draw(st.lists(containers(), min_size=1, max_size=3)), draw(st.lists(containers(), max_size=2))
    for index, container in enumerate([*app, *init]):
        container["name"] = f"c{index}"
    annotations = draw(
        st.dictionaries(
            st.sampled_from(["tangram.sh/gpu-count", "tangram.sh/class", "tangram.sh/clas", "mine"]),
            st.sampled_from(["1", "2", "0", "standard"]),
            max_size=1,
        )
    )
    spec: dict[str, Any] = {"containers": app, "initContainers": init, "priority": 0}
    spec |= draw(
        st.sampled_from([{}, {"schedulerName": "default-scheduler"}, {"hostPID": True}, {"schedulerName": None}])
    )
    return {"metadata": {"name": "a", "annotations": draw(st.sampled_from([annotations, None]))}, "spec": spec}


RULES = [
    AdmissionRules(),
    AdmissionRules(unit_mib=256, runtime_class="nvidia", priority_classes={"standard": "std"}, privileged="warn"),
    AdmissionRules(scheduler_name="default-scheduler", mig_on_demand=True),
]


@given(pods(), st.sampled_from(RULES))
@settings(max_examples=examples(400))
def test_what_came_in_requests_the_same_and_is_not_changed_again(pod: dict[str, Any], rules: AdmissionRules) -> None:
    try:
        verdict = mutate(pod, rules)
    except BadRequest:
        return
    mutated = applied(pod, list(verdict.ops))
    again = mutate(mutated, rules)
    assert again.ops == ()
    read = {"unit_mib": rules.unit_mib}
    assert pod_request(mutated, **read) == pod_request(pod, **read)


@given(pods(), st.sampled_from(RULES))
@settings(max_examples=examples(400))
def test_every_container_of_a_pod_that_requests_has_its_gpus_decided(
    pod: dict[str, Any], rules: AdmissionRules
) -> None:
    try:
        mutated = applied(pod, list(mutate(pod, rules).ops))
    except BadRequest:
        return
    requests = {request.container: request for request in pod_request(mutated, unit_mib=rules.unit_mib).containers}
    if not requests:
        assert mutated == pod
        return
    for container in [*mutated["spec"]["containers"], *mutated["spec"]["initContainers"]]:
        env = {entry["name"]: entry for entry in container.get("env", [])}
        if container["name"] in requests:
            request = requests[container["name"]]
            by_allocate = request.kind == "mig" and rules.mig_on_demand
            if by_allocate:
                assert not {"NVIDIA_VISIBLE_DEVICES", "TANGRAM_GPUS"} & set(env)
            for name in () if by_allocate else ("NVIDIA_VISIBLE_DEVICES", "TANGRAM_GPUS"):
                path = env[name]["valueFrom"]["fieldRef"]["fieldPath"]
                assert path == f"metadata.annotations['tangram.sh/gpus.{container['name']}']"
            whole = {name: str(number) for name, number in request.resources(rules.names).items()}
            assert container["resources"]["limits"] | whole == container["resources"]["limits"]
            assert container["resources"]["requests"] | whole == container["resources"]["requests"]
            assert request.kind != "share" or env["LD_PRELOAD"]["value"].split(":")[0] == CONTAINER_LIBRARY
        elif "nvidia.com/gpu" not in container["resources"]["limits"]:
            assert env["NVIDIA_VISIBLE_DEVICES"].get("value", "") in ("void", "")


junk = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(
        st.sampled_from(["metadata", "spec", "containers", "initContainers", "env", "name", "resources", "limits", GPU_MEM, "annotations", "value"]),
        inner, max_size=4,
    ),
    max_leaves=25,
)  # fmt: skip


def body_of(pod: Any, **request: Any) -> bytes:
    requested = {
        "uid": "u",
        "operation": "CREATE",
        "resource": {"group": "", "version": "v1", "resource": "pods"},
        "namespace": "ns",
    }
    return msgspec.json.encode(
        {
            "apiVersion": "admission.k8s.io/v1",
            "kind": "AdmissionReview",
            "request": requested | {"object": pod} | request,
        }
    )


def test_the_namespace_of_the_request_decides_and_not_the_pods_own() -> None:
    main = {"name": "c", "resources": {"limits": {GPU_MEM: "1"}}, "securityContext": {"privileged": True}}
    pod = {"metadata": {"name": "a", "namespace": "trusted"}, "spec": {"containers": [main]}}
    rules = AdmissionRules(privileged_namespaces=frozenset({"trusted"}))
    assert review(body_of(pod), rules).result == "denied"
    assert review(body_of(pod, namespace="trusted"), rules).result == "mutated"


@given(junk)
@settings(max_examples=examples(400))
def test_any_json_as_a_pod_gets_an_answer_and_never_the_webhooks_own_fault(pod: Any) -> None:
    answer = review(body_of(pod), AdmissionRules())
    response = msgspec.json.decode(answer.body)["response"]
    assert answer.result in ("unchanged", "denied")
    assert response["allowed"] or response["status"]["message"]


@given(st.one_of(st.binary(max_size=200), junk.map(msgspec.json.encode)))
@settings(max_examples=examples(300))
def test_any_bytes_as_a_review_are_refused_with_a_sentence(body: bytes) -> None:
    with pytest.raises(BadReview, match=r"must be|is no AdmissionReview"):
        review(body, AdmissionRules())


@given(
    st.text(max_size=12)
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.none()
    | st.lists(st.integers(), max_size=1)
)
@settings(max_examples=examples(400))
def test_a_malformed_quantity_never_comes_in(value: Any) -> None:
    pod = {
        "metadata": {"name": "a"},
        "spec": {"containers": [{"name": "c", "resources": {"limits": {GPU_MEM: value}}}]},
    }
    answer = review(body_of(pod), AdmissionRules())
    if answer.result == "denied":
        return
    patch = msgspec.json.decode(base64.b64decode(msgspec.json.decode(answer.body)["response"]["patch"]))
    number = applied(pod, patch)["spec"]["containers"][0]["resources"]["limits"][GPU_MEM]
    assert str(int(number)) == str(number)
    assert 1 <= int(number) <= 1024


def test_an_update_and_another_kind_are_let_through_unread() -> None:
    for changed in (
        {"operation": "UPDATE"},
        {"subResource": "binding"},
        {"resource": {"group": "apps", "resource": "deployments"}},
    ):
        assert review(body_of({"spec": 1}, **changed), AdmissionRules()).result == "unchanged"


def test_a_denial_names_a_pod_that_has_only_the_prefix_of_a_name() -> None:
    pod = {
        "metadata": {"generateName": "web-7f9c4-"},
        "spec": {"containers": [{"name": "c", "resources": {"limits": {GPU_MEM: "0"}}}]},
    }
    status = msgspec.json.decode(review(body_of(pod), AdmissionRules()).body)["response"]["status"]
    assert (status["code"], status["reason"]) == (422, "Invalid")
    assert (
        status["message"]
        == "pod ns/web-7f9c4-*: container c: tangram.sh/gpu-mem is 0: it must be a whole number, 1 to 1024 units of 1024 MiB, or bytes"
    )


@pytest.mark.parametrize("annotation", ["tangram.sh/class", "tangram.sh/gpu-cuont", "tangram.sh/gpus.c"])
def test_a_denial_for_an_annotation_names_the_pod_too(annotation: str) -> None:
    pod = {
        "metadata": {"name": "a", "annotations": {annotation: "x"}},
        "spec": {"containers": [{"name": "c", "resources": {"limits": {GPU_MEM: "1"}}}]},
    }
    status = msgspec.json.decode(review(body_of(pod), AdmissionRules()).body)["response"]["status"]
    assert status["message"].startswith(f"pod ns/a: annotation {annotation} ")


def test_the_webhooks_own_fault_denies_with_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr("webhook.review.mutate", broken)
    answer = review(body_of({}), AdmissionRules())
    assert answer.result == "error"
    response = msgspec.json.decode(answer.body)["response"]
    assert response["allowed"] is False
    assert "ZeroDivisionError" in response["status"]["message"]


def test_the_webhook_admits_only_policies_that_placement_has() -> None:
    assert set(Settings(_cli_parse_args=False).rules().policies) <= set(POLICIES)

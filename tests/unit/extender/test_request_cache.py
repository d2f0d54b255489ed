"""A cached request is what reading it anew gives."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from extender.state import State
from kube.objects import Pod
from tests.builders import pod
from vgpu.api.errors import BadRequest
from vgpu.api.names import DEFAULT
from vgpu.api.request import PodRequest, pod_request
from vgpu.scheduling.policies.registry import POLICIES

ANNOTATIONS = st.dictionaries(
    st.sampled_from([*sorted(DEFAULT.user_annotations), DEFAULT.assignment, DEFAULT.gpus_of("main"), "team"]),
    st.sampled_from(["best-effort", "latency-critical", "3", "binpack", "spread", "x"]),
)


def decoded(mib: int, cpu: str, annotations: dict[str, str], name: str = "p") -> Pod:
    plain = pod(name).asking(mib=mib).plain()
    plain["metadata"]["annotations"] = annotations
    plain["spec"]["containers"][0]["resources"]["requests"] = {"cpu": cpu}
    return msgspec.convert(plain, Pod)


def answer(read: Callable[[], PodRequest]) -> PodRequest | str:
    try:
        return read()
    except BadRequest as error:
        return str(error)


@given(st.lists(st.tuples(st.sampled_from([1024, 2048]), st.sampled_from([1000, 250]), ANNOTATIONS), max_size=12))
def test_pods_in_any_order_request_what_each_spec_requests(pods: list[tuple[int, int, dict[str, str]]]) -> None:
    state = State(time.monotonic, names=DEFAULT)
    for at, (mib, milli, annotated) in enumerate(pods):
        one = decoded(mib, f"{milli}m", annotated, f"p{at}")
        wanted = answer(lambda one=one: pod_request(one.plain(), names=DEFAULT, policies=POLICIES))  # type: ignore[misc]
        found = answer(lambda one=one: state.request_of(one))  # type: ignore[misc]
        assert found == (wanted if isinstance(wanted, str) else replace(wanted, cpu_milli=milli))


def test_pods_of_one_template_are_read_once() -> None:
    state = State(time.monotonic, names=DEFAULT)
    first = state.request_of(decoded(1024, "1", {"team": "a"}, "first"))
    bound = {"team": "b", DEFAULT.assignment: "{}", DEFAULT.gpus_of("main"): "GPU-1"}
    assert state.request_of(decoded(1024, "1", bound, "second")) is first

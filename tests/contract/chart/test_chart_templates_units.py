"""The policies on templates compute in CEL what the webhook computes in Python, and which objects they concern.

One object with many containers holds many quantities, so that a property needs a few requests only.
"""

from __future__ import annotations

from fractions import Fraction
from math import ceil

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from tests.apiserver import ApiServer, Denied
from tests.contract.chart.kueue_double import Kueue
from tests.contract.chart.rendering import Helm
from tests.contract.chart.templates_kit import (
    CUSTOM,
    GPU_MEM,
    JOB,
    KINDS,
    ONLY_QUEUED,
    QUEUE,
    RAY_CLUSTER,
    container,
    create,
    in_force,
    pod_template,
    texts,
    thing,
)
from tests.examples import examples
from vgpu.api.errors import BadRequest
from vgpu.api.quantity import MEMORY_UNITS_MIB, MIB, SMALLEST_BYTES, memory_units, parse

MPI_JOB = next(of for of in CUSTOM if of.kind == "MPIJob")
NANO = 10**9


def rounded(text: str) -> Fraction:
    """The quantity as Kubernetes has it: away from zero to a billionth (apimachinery, ParseQuantity)."""
    value = parse(text)
    return Fraction(ceil(abs(value) * NANO), NANO) * (-1 if value < 0 else 1)


def units_of(text: str, unit_mib: int) -> str:
    """What the webhook makes of bytes; everything else stays as it is."""
    value = rounded(text)
    if value < SMALLEST_BYTES:
        return text
    try:
        return str(memory_units(f"{value * NANO}n", unit_mib=unit_mib, what="it"))
    except BadRequest:
        return text


numbers = st.one_of(
    st.integers(0, 2**20).map(str),
    st.integers(2**20, 2**64).map(str),
    st.decimals(0, 2**22, places=3).map(str),
    st.decimals(0, 9, places=9).map(str),
    st.integers(0, 99).map(lambda n: f".{n:02}"),
    st.integers(0, 10**6).map(lambda n: f"{n}."),
)
suffixes = st.sampled_from(
    ["", *"numkMGTPE", *(f"{one}i" for one in "KMGTPE"), "e3", "E6", "e9", "E+12", "e-3", "e0", "E15"]
)
written = st.builds(lambda number, suffix: number + suffix, numbers, suffixes).filter(lambda text: len(text) < 40)
around = st.builds(
    lambda units, unit, off: str(units * unit * MIB + off),
    st.integers(1, 2**20 + 1), st.sampled_from(list(MEMORY_UNITS_MIB.values())), st.integers(-2, 2),
)  # fmt: skip
EDGES = [
    "8", "1048575", "1048576", "1048577", "1Mi", "1M", "2M", "1024Ki", "1023.999Ki", "1Gi", "1073741825", "1.5Gi", "0.5Gi", "8G", "8e9", "8E9", "8E+9", "8E",
    "8Ei", "1Ei", "1P", "1Pi", "1Ti", "1048575Gi", "1048576Gi", "1125899906842624", "1125898833100800", "1125898833100801", "1048576000m", "1048576001m",
    "1048576000000u", "1048576000000000n", "1048576000000001n", "1048576.5", "1048576.9999999999", "1048576.0000000001", "8589934592.", "+8Gi", "-8Gi", "0",
    "8gb", "", "9223372036854775808", "99999999999999999999", "562949953421311.999999999", "562949953421312.000000000", "8e-0", "1e99",
    "1881413457173000000u", "2116086573149000000u",  # more digits than a double has
]  # fmt: skip


def readable(text: str) -> bool:
    try:
        parse(text)
    except BadRequest:
        return False
    return True


@pytest.mark.parametrize("unit", MEMORY_UNITS_MIB)
def test_cel_computes_what_the_webhook_computes(kinds: ApiServer, helm: Helm, unit: str) -> None:
    """In a custom resource: its quantities are those that the user wrote."""
    unit_mib = MEMORY_UNITS_MIB[unit]

    @settings(max_examples=examples(8), deadline=None, suppress_health_check=list(HealthCheck))
    @given(quantities=st.lists(st.one_of(written, around), min_size=40, max_size=60))
    @example(quantities=EDGES)
    def every_quantity(quantities: list[str]) -> None:
        containers = [container(f"c{at}", text) for at, text in enumerate(quantities)]
        wanted = [units_of(text, unit_mib) if readable(text) else text for text in quantities]
        half = len(containers) // 2
        made = thing(
            MPI_JOB, pod_template(*containers[half:], init=tuple(containers[:half])), pod_template(container("worker"))
        )
        assert dict(zip(quantities, texts(create(kinds, MPI_JOB, made), MPI_JOB), strict=True)) == dict(
            zip(quantities, wanted, strict=True)
        )

    with in_force(kinds, helm, {"memoryUnit": unit}, only="mpijobs"):
        every_quantity()


def test_the_same_holds_for_a_job_whose_quantities_kubernetes_writes_anew(kinds: ApiServer, helm: Helm) -> None:
    """`0.5Gi` is stored as `512Mi`, and so on. It takes no extended resource of 2**53 or more: thousandths must fit into 63 bits."""
    whole = [text for text in EDGES if readable(text) and 1 <= parse(text) < 2**53 and parse(text).denominator == 1]
    template = pod_template(*(container(f"c{at}", text) for at, text in enumerate(whole)))
    with in_force(kinds, helm, only="jobs"):
        written = texts(create(kinds, JOB, thing(JOB, template, queue="")), JOB)
        counted = texts(create(kinds, JOB, thing(JOB, template)), JOB)
    assert written != whole
    assert counted == [units_of(text, 1024) for text in written]
    assert [parse(text) for text in counted] == [parse(units_of(text, 1024)) for text in whole]


def test_with_kueue_enabled_jobs_without_a_queue_are_normalised_too(kinds: ApiServer, helm: Helm) -> None:
    with in_force(kinds, helm, {"queues": {"kueue": {"enabled": True}}}):
        for of in KINDS:
            stored = create(kinds, of, thing(of, pod_template(container("main", "8Gi")), queue=""))
            assert set(texts(stored, of)) == {"8Gi" if of.kind in ONLY_QUEUED else "8"}, of.kind


def test_bytes_that_were_stored_before_stay_and_hinder_no_other_change(kinds: ApiServer, helm: Helm) -> None:
    """Kueue may still suspend such a job, and move it. It never admits it."""
    template = pod_template(container("main", "8Gi"), container("side", "8Gi"))
    paths = {}
    for of in (JOB, RAY_CLUSTER):
        made = create(kinds, of, thing(of, template, name="before"), dry=False)
        paths[of.kind] = f"{of.path}/{made['metadata']['name']}"
    flavor = {"spec": {"template": {"spec": {"nodeSelector": {"pool": "a"}}}}}
    with in_force(kinds, helm):
        kinds.patch(paths["Job"], {"spec": {"suspend": True}})
        assert f"0 + {2**34} > 40" in Kueue(kinds, {GPU_MEM: 40}, {}).reconcile(paths["Job"])
        kinds.patch(paths["Job"], flavor)
        for path in paths.values():
            kinds.patch(path, {"spec": {"suspend": False}, "metadata": {"labels": {QUEUE: "other"}}})
        changed = thing(RAY_CLUSTER, pod_template(container("main", "8Gi"), container("side", "9Gi")))
        with pytest.raises(Denied, match=r"container side: tangram\.sh/gpu-mem is 9Gi"):
            kinds.patch(paths["RayCluster"], {"spec": changed["spec"]})
    for path in paths.values():
        kinds("DELETE", path, {"propagationPolicy": "Background"})

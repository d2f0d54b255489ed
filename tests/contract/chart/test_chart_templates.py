"""Pod templates that Kueue counts get memory in units when their object is created, wherever a kind has them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.apiserver import ApiServer
from tests.contract.chart.rendering import Helm
from tests.contract.chart.templates_kit import (
    CUSTOM,
    GPU_MEM,
    KINDS,
    QUEUE,
    Counted,
    container,
    create,
    get,
    in_force,
    pod_template,
    put,
    texts,
    thing,
)
from tests.contract.webhook.pairs import applied
from webhook.admission_rules import AdmissionRules
from webhook.mutate import mutate

BYTES = pod_template(
    container("a", "8Gi", "8Gi"), container("b", "500Mi"), container("c"), init=(container("i", "1.5Gi"),)
)
UNITS = ["2", "8", "8", "1"]


@pytest.fixture(scope="module")
def normalising(kinds: ApiServer, helm: Helm) -> Iterator[ApiServer]:
    with in_force(kinds, helm):
        yield kinds


each_kind = pytest.mark.parametrize("of", KINDS, ids=lambda of: of.kind)


@each_kind
def test_every_template_of_a_kind_is_normalised(normalising: ApiServer, of: Counted) -> None:
    stored = create(normalising, of, thing(of, BYTES))
    assert texts(stored, of) == UNITS * len(of.templates)


@each_kind
def test_the_webhook_finds_the_same_units_in_the_pods_that_are_made_from_it(
    normalising: ApiServer, of: Counted
) -> None:
    stored = create(normalising, of, thing(of, BYTES))
    for place in of.templates:
        template = get(stored, place)
        patched = applied(template, list(mutate(template, AdmissionRules()).ops))
        limits = [
            one["resources"].get("limits")
            for one in [*patched["spec"]["initContainers"], *patched["spec"]["containers"]]
        ]
        assert limits == [{GPU_MEM: "2"}, {GPU_MEM: "8"}, {GPU_MEM: "1"}, None]


@pytest.mark.parametrize("of", CUSTOM, ids=lambda of: of.kind)
def test_what_is_not_there_is_no_obstacle(normalising: ApiServer, of: Counted) -> None:
    """The policies must not fail where the kind's own rules admit an object; a custom resource may also have numbers."""
    bare = {"apiVersion": of.api, "kind": of.kind, "metadata": {"name": "bare", "labels": {QUEUE: "team"}}}
    create(normalising, of, bare)
    create(normalising, of, bare | {"spec": {}})
    for empty in (
        {},
        {"spec": {}},
        {"spec": {"containers": []}},
        {"spec": {"containers": [{}]}},
        {"spec": {"containers": [{"resources": {}}]}},
    ):
        create(normalising, of, thing(of, empty))
    for at in of.templates:
        made = thing(of, {})
        put(made, at, pod_template(container("main", 8 * 2**30), container("more", 4)))
        last = create(normalising, of, made)
        assert [one["resources"]["limits"][GPU_MEM] for one in get(last, at)["spec"]["containers"]] == ["8", 4]


@each_kind
def test_without_a_queue_nothing_is_changed_or_denied(normalising: ApiServer, of: Counted) -> None:
    assert set(texts(create(normalising, of, thing(of, pod_template(container("main", "8Gi")), queue="")), of)) == {
        "8Gi"
    }


@each_kind
def test_what_another_counted_object_made_is_left_alone(normalising: ApiServer, of: Counted) -> None:
    """Its owner's templates were looked at, and a controller that finds its object changed might replace it. A CronJob is not counted."""
    for owner, text in (("RayJob", "8Gi"), ("TrainJob", "8Gi"), ("CronJob", "8"), ("Workflow", "8")):
        made = thing(of, pod_template(container("main", "8Gi")))
        reference = {"apiVersion": "x/v1", "kind": owner, "name": "owner", "uid": "u", "controller": True}
        made["metadata"]["ownerReferences"] = [reference]
        assert set(texts(create(normalising, of, made), of)) == {text}, owner

"""The scheduler's pod: kube-scheduler and its configuration, and the extender's rights for what is switched on."""

from __future__ import annotations

from typing import Final

import pytest
import yaml

from tests.contract.chart.rendering import NAMESPACE, Helm, Objects, Refused, env


@pytest.mark.parametrize(
    ("given", "tag"),
    [
        ("v1.36.3", "v1.36.3"),
        ("v1.33.5-gke.1162000", "v1.33.5"),
        ("v1.34.1+k3s1", "v1.34.1"),
        ("v1.30.14-eks-2d5f260", "v1.30.14"),
    ],
)
def test_kube_scheduler_is_of_the_clusters_own_version(helm: Helm, given: str, tag: str) -> None:
    image = helm.objects(kube=given).container("kube-scheduler")["image"]
    assert image == f"registry.k8s.io/kube-scheduler:{tag}"


def test_the_scheduler_knows_every_resource_and_calls_the_extender_beside_it(helm: Helm, local: Objects) -> None:
    config = yaml.safe_load(local.one("ConfigMap", "tangram-scheduler")["data"]["scheduler.yaml"])
    extender, _ = config["extenders"]
    port = env(local.container("extender"))["TANGRAM_EXTENDER_PORT"]
    assert extender["urlPrefix"] == f"http://127.0.0.1:{port}"
    names = [resource["name"] for resource in extender["managedResources"]]
    assert names[:3] == ["tangram.sh/gpu-mem", "tangram.sh/gpu-core", "tangram.sh/gpu"]
    assert {"tangram.sh/mig-1g.10gb", "tangram.sh/mig-3g.40gb", "tangram.sh/mig-1g.18gb.me"} <= set(names)
    assert not any(resource["ignoredByScheduler"] for resource in extender["managedResources"])
    assert (extender["nodeCacheCapable"], extender["ignorable"]) == (True, False)
    assert (extender["filterVerb"], extender["preemptVerb"], extender["bindVerb"]) == ("filter", "preempt", "bind")
    assert (extender["prioritizeVerb"], extender["weight"]) == ("prioritize", 2)
    assert config["percentageOfNodesToScore"] == 100
    assert config["profiles"] == [{"schedulerName": "tangram-scheduler"}]
    election = config["leaderElection"]
    assert (election["resourceNamespace"], election["resourceName"]) == (NAMESPACE, "tangram-scheduler")
    assert env(local.container("webhook"))["TANGRAM_WEBHOOK_SCHEDULER_NAME"] == "tangram-scheduler"


@pytest.mark.parametrize(
    ("preempts", "ahead", "may"),
    [(False, "never", False), (True, "never", True), (False, "always", True), (False, "auto", True)],
)
def test_the_scheduler_may_nominate_only_where_it_does(helm: Helm, preempts: bool, ahead: str, may: bool) -> None:
    values = {"preemption": {"enabled": preempts}, "nominateAhead": ahead, "name": "other"}
    objects = helm.objects({"scheduler": values})
    rules = objects.one("ClusterRole", "tangram-scheduler")["rules"]
    assert ("pods/status" in {resource for rule in rules for resource in rule["resources"]}) is may
    given = env(objects.container("extender"))
    assert given["TANGRAM_EXTENDER_NOMINATE_AHEAD"] == ahead
    assert given["TANGRAM_EXTENDER_SCHEDULER_NAME"] == "other"


def test_the_scheduler_may_evict_only_where_preemption_is_on(helm: Helm) -> None:
    evicting = {"pods/eviction", "poddisruptionbudgets"}
    for on in (True, False):
        objects = helm.objects({"scheduler": {"preemption": {"enabled": on}}})
        role = objects.one("ClusterRole", "tangram-scheduler")
        may = {resource for rule in role["rules"] for resource in rule.get("resources", ())}
        assert may & evicting == (evicting if on else set())
        assert "events" in may, "an extender that evicts nobody still reports why a pod waits"
        assert env(objects.container("extender"))["TANGRAM_EXTENDER_PREEMPTION"] == str(on).lower()


def test_kube_scheduler_has_the_feature_gates_that_are_chosen_and_no_others(helm: Helm) -> None:
    gates = {"GenericWorkload": True, "GangScheduling": True, "SchedulerPopFromBackoffQ": False}
    for chosen, flags in (
        (gates, ["--feature-gates=GangScheduling=true,GenericWorkload=true,SchedulerPopFromBackoffQ=false"]),
        ({}, []),
    ):
        command = helm.objects({"scheduler": {"kubeScheduler": {"featureGates": chosen}}}).container("kube-scheduler")
        assert [one for one in command["command"] if "gates" in one] == flags


def test_gangs_are_refused_where_the_api_server_serves_no_pod_groups(helm: Helm) -> None:
    gangs = {"scheduler": {"kubeScheduler": {"featureGates": {"GenericWorkload": True}}}}
    with pytest.raises(Refused, match="GenericWorkload=true, and the API server serves no PodGroups"):
        helm.text(gangs, served=["v1/Pod", "scheduling.k8s.io/v1/PriorityClass"])
    assert "--feature-gates=GenericWorkload=true" in helm.text(
        gangs, served=["v1/Pod", "scheduling.k8s.io/v1alpha2/PodGroup"]
    )
    assert helm.text({}, served=["v1/Pod"])


SCHEDULING: Final = {
    ("", "nodes", "get,list,watch"),
    ("", "pods", "get,list,watch"),
    ("", "pods/binding", "create"),
    ("", "pods/status", "patch"),
    ("events.k8s.io", "events", "create,patch"),
    ("scheduling.k8s.io", "podgroups", "list,watch"),
}
EVICTING: Final = {("policy", "poddisruptionbudgets", "get,list,watch"), ("", "pods/eviction", "create")}
"""All that the extender may do in the cluster: group, resource, verbs."""


def test_the_scheduler_may_read_workloads_and_controllers_only_where_it_heeds_kueue(helm: Helm) -> None:
    kueue = {"enabled": True, "controllers": ["pods", "jobsets.jobset.x-k8s.io"]}
    wanted = {
        ("kueue.x-k8s.io", "workloads", "list,watch"),
        ("jobset.x-k8s.io", "jobsets", "get"),
        ("", "pods", "get"),
    }
    for values, more in (
        ({"queues": {"kueue": kueue}}, wanted),
        ({"queues": {"kueue": kueue | {"evict": "never"}}}, wanted),
        ({"queues": {"kueue": kueue | {"evict": "whole"}}}, wanted | {("kueue.x-k8s.io", "workloads", "patch")}),
        ({"queues": {"kueue": kueue | {"enabled": False, "evict": "whole"}}}, set()),
        ({"queues": {"kueue": kueue}, "scheduler": {"preemption": {"enabled": False}}}, set()),
    ):
        rules = helm.objects(values).one("ClusterRole", "tangram-scheduler")["rules"]
        may = [
            (group, resource, ",".join(rule["verbs"]))
            for rule in rules
            for group in rule["apiGroups"]
            for resource in rule["resources"]
        ]
        evicts = values.get("scheduler", {}).get("preemption", {}).get("enabled", True)
        assert sorted(may) == sorted(SCHEDULING | (EVICTING if evicts else set()) | more)
        assert all(rule.keys() == {"apiGroups", "resources", "verbs"} for rule in rules)


def test_a_change_of_the_schedulers_configuration_restarts_it_and_who_reads_the_same_value(helm: Helm) -> None:
    """The device plugin offers only MIG profiles that the scheduler's configuration names."""
    before, after = helm.objects(), helm.objects({"migProfiles": ["1g.5gb"]})
    changed = {
        thing["metadata"]["name"]
        for (thing, template), (_, other) in zip(before.pods(), after.pods(), strict=True)
        if template != other
    }
    assert changed == {"tangram-scheduler", "tangram-node"}


def test_several_active_schedulers_are_refused(helm: Helm) -> None:
    with pytest.raises(Refused, match=r"scheduler\.replicas is 3 with scheduler\.leaderElect=false"):
        helm.objects({"scheduler": {"leaderElect": False, "replicas": 3}})


def test_added_mig_profiles_are_managed_once_each(helm: Helm) -> None:
    objects = helm.objects({"extraMigProfiles": ["5g.99gb", "1g.5gb"]})
    config = yaml.safe_load(objects.one("ConfigMap", "tangram-scheduler")["data"]["scheduler.yaml"])
    names = [resource["name"] for resource in config["extenders"][0]["managedResources"]]
    assert names.count("tangram.sh/mig-5g.99gb") == names.count("tangram.sh/mig-1g.5gb") == 1

"""Every variable that the chart gives a component is a setting of it, and a value that it takes."""

from __future__ import annotations

import importlib
import json
import os
from typing import Any

import annotated_types
import pytest
import yaml
from pydantic_settings import BaseSettings

from arbiter.settings import ArbiterSettings
from extender.settings import KUEUE_CONTROLLERS, Settings
from tests.contract.chart.rendering import CHART, EXAMPLES, Helm, Refused, env

COMPONENTS = {
    "plugin": "deviceplugin",
    "pool": "hostpool",
    "arbiter": "arbiter",
    "extender": "extender",
    "webhook": "webhook",
}
"""Container -> package."""


def settings_of(package: str) -> type[BaseSettings]:
    module = importlib.import_module(f"{package}.settings")
    (found,) = (
        thing
        for thing in vars(module).values()
        if isinstance(thing, type) and issubclass(thing, BaseSettings) and thing.__module__ == module.__name__
    )
    return found


@pytest.mark.parametrize("container", COMPONENTS)
@pytest.mark.parametrize("example", EXAMPLES)
def test_a_component_starts_with_what_the_chart_sets(
    helm: Helm, example: str, container: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    objects = helm.objects(EXAMPLES[example])
    rendered = {c["name"]: c for _, c in objects.containers()}
    if container not in rendered:
        assert (container == "pool" and example != "host-pool") or (example, container) == ("own-scheduler", "extender")
        return
    given = {name: value for name, value in env(rendered[container]).items() if name.startswith("TANGRAM_")}
    settings = settings_of(COMPONENTS[container])
    prefix = settings.model_config["env_prefix"]
    unknown = [name for name in given if name.removeprefix(prefix).lower() not in settings.model_fields]
    assert unknown == []
    for name in [name for name in os.environ if name.startswith("TANGRAM_")]:
        monkeypatch.delenv(name)
    for name, value in given.items():
        monkeypatch.setenv(name, value if isinstance(value, str) else "from-the-api")
    made: Any = settings()
    assert made.log_level == "info"


TIME = {
    "frameMs": "frame_ms",
    "idleGraceUs": "idle_grace_us",
    "starveAfterMs": "starve_after_ms",
    "starveSliceMs": "starve_slice_ms",
    "watchdogMs": "watchdog_ms",
    "awakeMs": "awake_ms",
}
"""Chart value under arbiter.time -> setting."""


def test_the_values_of_gpu_time_are_those_of_the_arbiter_with_its_defaults_and_its_ranges() -> None:
    values = yaml.safe_load((CHART / "values.yaml").read_text())["arbiter"]["time"]
    schema = json.loads((CHART / "values.schema.json").read_text())
    ranges = schema["properties"]["arbiter"]["properties"]["time"]["properties"]
    assert values.keys() == ranges.keys() == TIME.keys()
    for value, setting in TIME.items():
        field = ArbiterSettings.model_fields[setting]
        assert values[value] == field.default, value
        limits = {type(limit): limit for limit in field.metadata}
        least, most = limits.get(annotated_types.Ge), limits.get(annotated_types.Le)
        reported = ranges[value].get("minimum"), ranges[value].get("maximum")
        assert reported == (getattr(least, "ge", None), getattr(most, "le", None)), value


def test_a_value_of_gpu_time_reaches_the_arbiter(helm: Helm) -> None:
    given = {
        "frameMs": 20,
        "idleGraceUs": 0,
        "starveAfterMs": 600_000,
        "starveSliceMs": 7,
        "watchdogMs": 0,
        "awakeMs": 20,
    }
    rendered = env(helm.objects({"arbiter": {"time": given}}).container("arbiter"))
    for value, setting in TIME.items():
        assert rendered[f"TANGRAM_ARBITER_{setting.upper()}"] == str(given[value]).lower()


@pytest.mark.parametrize(("waits_s", "given_s", "expected_s"), [(5, 0, 3.0), (2, 0, 1.2), (60, 0, 36.0), (5, 4.5, 4.5)])
def test_the_search_for_victims_ends_before_kube_scheduler_hangs_up(
    helm: Helm, waits_s: int, given_s: float, expected_s: float
) -> None:
    scheduler = {"extender": {"httpTimeoutSeconds": waits_s}, "preemption": {"deadlineSeconds": given_s}}
    rendered = env(helm.objects({"scheduler": scheduler}).container("extender"))
    deadline_s = float(str(rendered["TANGRAM_EXTENDER_PREEMPTION_DEADLINE_S"]))
    assert deadline_s == expected_s < waits_s


def test_a_search_for_victims_that_kube_scheduler_would_not_wait_for_is_refused(helm: Helm) -> None:
    with pytest.raises(Refused, match=r"scheduler.preemption.deadlineSeconds is 5: kube-scheduler waits .* \(5\)"):
        helm.objects({"scheduler": {"preemption": {"deadlineSeconds": 5}}})


def test_the_ports_that_are_named_are_those_that_are_listened_on(helm: Helm) -> None:
    objects = helm.objects(EXAMPLES["local"])
    for _, container in objects.containers():
        set_ports = {int(value) for name, value in env(container).items() if name.endswith("_PORT")}
        named = {port["containerPort"] for port in container.get("ports", [])}
        # the extender's own port is on 127.0.0.1, for kube-scheduler alone
        assert set_ports - named <= {8888}, container["name"]
        if set_ports:
            assert named <= set_ports


@pytest.mark.parametrize(("component", "command", "module"), [("plugin", "tangram-deviceplugin", "deviceplugin.__main__"), ("extender", "tangram-extender", "extender.__main__"), ("webhook", "tangram-webhook", "webhook.__main__"), ("arbiter", "tangram-arbiter-supervisor", "arbiter.supervisor"), ("pool", "tangram-hostpool", "hostpool.__main__")])  # fmt: skip
def test_the_commands_are_the_projects_entry_points(helm: Helm, component: str, command: str, module: str) -> None:
    assert helm.objects(EXAMPLES["host-pool"]).container(component)["command"] == [command]
    assert callable(importlib.import_module(module).main)


def test_kueue_is_off_and_its_controllers_are_those_that_the_extender_knows_by_itself(helm: Helm) -> None:
    assert not [name for name in env(helm.objects().container("extender")) if "KUEUE" in name]
    rendered = env(helm.objects({"queues": {"kueue": {"enabled": True}}}).container("extender"))
    assert rendered["TANGRAM_EXTENDER_KUEUE"] == "true"
    assert rendered["TANGRAM_EXTENDER_KUEUE_CONTROLLERS"] == KUEUE_CONTROLLERS


def test_the_longest_list_of_controllers_that_the_chart_takes_is_one_that_the_extender_takes(helm: Helm) -> None:
    schema = json.loads((CHART / "values.schema.json").read_text())
    of = schema["properties"]["queues"]["properties"]["kueue"]["properties"]["controllers"]
    longest = [f"k{at}".ljust(of["items"]["maxLength"], "s") for at in range(of["maxItems"])]
    rendered = env(helm.objects({"queues": {"kueue": {"enabled": True, "controllers": longest}}}).container("extender"))
    text = rendered["TANGRAM_EXTENDER_KUEUE_CONTROLLERS"]
    assert text == ",".join(longest)
    assert Settings(_cli_parse_args=False, kueue_controllers=text).kueue_controllers == text


@pytest.mark.parametrize("evict", ["never", "whole"])
def test_what_is_evicted_of_a_workload_is_as_it_is_set(helm: Helm, evict: str) -> None:
    rendered = env(helm.objects({"queues": {"kueue": {"enabled": True, "evict": evict}}}).container("extender"))
    assert rendered["TANGRAM_EXTENDER_KUEUE_EVICT"] == evict

"""What the webhook's settings refuse."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from webhook.settings import Settings


@pytest.mark.parametrize(
    ("policies", "why"),
    [
        (["binpack", "best"], "best: placement policies are binpack, spread, fragmentation, topology, cool, scheduler"),
        (["spread"], "policies are spread: default_policy is binpack, which must be one, for pods that name none"),
        ([], "policies are none: default_policy is binpack, which must be one"),
    ],
)
def test_policies_that_do_not_exist_or_lack_the_default_are_refused(policies: list[str], why: str) -> None:
    with pytest.raises(ValidationError, match=why):
        Settings(policies=policies, _cli_parse_args=False)  # type: ignore[call-arg]


def test_a_cluster_may_keep_its_pods_to_some_policies() -> None:
    settings = Settings(policies=["binpack", "topology"], _cli_parse_args=False)  # type: ignore[call-arg]
    assert settings.rules().policies == ("binpack", "topology")


def test_a_cluster_may_have_another_default_policy() -> None:
    settings = Settings(policies=["spread"], default_policy="spread", _cli_parse_args=False)  # type: ignore[call-arg]
    rules = settings.rules()
    assert (rules.policies, rules.default_policy) == (("spread",), "spread")


@pytest.mark.parametrize(
    ("given", "why"),
    [
        (
            {"burst_max": {"team-a": "8gb"}},
            "burst_max of namespace team-a: .* Kubernetes quantity.* it may also be max",
        ),
        ({"burst_default": {"*": "-1"}}, r"burst_default of namespace \* is -1"),
        (
            {"burst_default": {"team-a": "9Gi"}, "burst_max": {"team-a": "8Gi", "*": "max"}},
            "burst_default of namespace team-a is 9Gi: it must be at most its burst_max, which is 8Gi",
        ),
        ({"burst_default": {"team-a": "max"}, "burst_max": {"*": "8Gi"}}, "at most its burst_max, which is 8Gi"),
        ({"burst_default": {"team-a": "1Gi"}, "burst_max": {"b": "9Gi"}}, "at most its burst_max, which is None"),
    ],
)
def test_burst_limits_that_are_none_or_beyond_their_bound_are_refused(
    given: dict[str, dict[str, str]], why: str
) -> None:
    with pytest.raises(ValidationError, match=why):
        Settings(**given, _cli_parse_args=False)  # type: ignore[arg-type]


def test_burst_limits_reach_the_rules() -> None:
    given = {"burst_default": {"a": "8", "*": "max"}, "burst_max": {"a": "8Gi", "*": "max"}}
    rules = Settings(burst_enabled=True, **given, _cli_parse_args=False).rules()  # type: ignore[arg-type]
    assert (rules.burst_enabled, rules.burst_default, rules.burst_max) == (True, *given.values())

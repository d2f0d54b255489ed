"""What the webhook's settings refuse."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from webhook.settings import Settings


@pytest.mark.parametrize(
    ("policies", "why"),
    [
        (["binpack", "best"], "best: placement policies are binpack, spread, fragmentation, topology, scheduler"),
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

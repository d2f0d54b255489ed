"""The owner of a token, and whether it may read the metrics, as the API server decides."""

from __future__ import annotations

import pytest

from kube.paths import ACCESS_REVIEWS, TOKEN_REVIEWS
from kube.review import may_get
from tests.fake_api import FakeApi, answer_with

PROMETHEUS = "system:serviceaccount:monitoring:prometheus"


@pytest.mark.parametrize(
    ("token", "status", "why"),
    [
        ("prometheus", 200, "ok"),
        ("container", 403, "system:serviceaccount:team:default may not get /metrics"),
        ("made-up", 401, "does not know this token"),
    ],
)
async def test_a_token_gets_what_its_owner_may(token: str, status: int, why: str) -> None:
    async with FakeApi() as api, api.client() as client:
        api.tokens = {"prometheus": PROMETHEUS, "container": "system:serviceaccount:team:default"}
        api.may = {PROMETHEUS: {"/metrics"}}
        verdict = await may_get(client, token, "/metrics")
    assert verdict.status == status
    assert why in verdict.why


async def test_no_access_is_reviewed_for_an_unknown_token() -> None:
    async with FakeApi() as api, api.client() as client:
        await may_get(client, "made-up", "/metrics")
        assert api.requests == [f"POST {TOKEN_REVIEWS}"]


@pytest.mark.parametrize("path", [TOKEN_REVIEWS, ACCESS_REVIEWS])
@pytest.mark.parametrize(("code", "reason"), [(500, "InternalError"), (403, "Forbidden")])
async def test_where_the_api_server_does_not_answer_no_client_is_let_in_or_called_unknown(
    path: str, code: int, reason: str
) -> None:
    async with FakeApi() as api, api.client() as client:
        api.tokens, api.may = {"prometheus": PROMETHEUS}, {PROMETHEUS: {"/metrics"}}
        api.faults.append(answer_with("POST", path, code, reason, "it is not well"))
        verdict = await may_get(client, "prometheus", "/metrics")
    assert verdict.status == 503
    assert reason in verdict.why

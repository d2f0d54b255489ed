"""The owner of a token, and whether it may get a path: as `kube-rbac-proxy` has it reviewed, by a TokenReview and a SubjectAccessReview.

Needs the verb `create` for both (the ClusterRole `system:auth-delegator` has it). Does not define how long an answer counts.
"""

from __future__ import annotations

from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, Final

import msgspec

from kube import paths
from kube.client import Client
from kube.errors import ApiError

CALL_S: Final = 2.0
"""For each of the two calls. Guessed: they take milliseconds."""


@dataclass(frozen=True, slots=True)
class AccessDecision:
    """`status`: 200, 401, 403, or 503 where the API server does not answer. `why` is for the client that sent the token."""

    status: HTTPStatus
    why: str


class User(msgspec.Struct, frozen=True):
    """The owner of the token; sent on as it came."""

    username: str = ""
    uid: str = ""
    groups: list[str] = msgspec.field(default_factory=list)
    extra: dict[str, list[str]] = msgspec.field(default_factory=dict)


class TokenStatus(msgspec.Struct, frozen=True):
    """`status` of a TokenReview."""

    authenticated: bool = False
    user: User = User()


class AccessStatus(msgspec.Struct, frozen=True):
    """`status` of a SubjectAccessReview."""

    allowed: bool = False
    denied: bool = False


class TokenReview(msgspec.Struct, frozen=True):
    """The answer."""

    status: TokenStatus = TokenStatus()


class AccessReview(msgspec.Struct, frozen=True):
    """The answer."""

    status: AccessStatus = AccessStatus()


async def may_get(client: Client, token: str, path: str) -> AccessDecision:
    """May the owner of this token get the path? Never raises for what the API server answers, or that it does not."""
    try:
        return await _reviewed(client, token, path)
    except ApiError as error:
        return AccessDecision(HTTPStatus.SERVICE_UNAVAILABLE, f"the API server reviews no token: {error.reason}")
    except msgspec.MsgspecError as error:
        return AccessDecision(HTTPStatus.SERVICE_UNAVAILABLE, f"the API server's review cannot be read: {error}")


async def _reviewed(client: Client, token: str, path: str) -> AccessDecision:
    """Raises ApiError, MsgspecError."""
    requested: dict[str, Any] = {
        "apiVersion": "authentication.k8s.io/v1",
        "kind": "TokenReview",
        "spec": {"token": token},
    }
    answer = await client.send("POST", paths.TOKEN_REVIEWS, requested, timeout_s=CALL_S)
    token_status = msgspec.json.decode(answer, type=TokenReview).status
    if not token_status.authenticated or not token_status.user.username:
        return AccessDecision(HTTPStatus.UNAUTHORIZED, "the API server does not know this token")
    user = token_status.user
    requested = {
        "apiVersion": "authorization.k8s.io/v1",
        "kind": "SubjectAccessReview",
        "spec": {
            "user": user.username, "uid": user.uid, "groups": user.groups, "extra": user.extra,
            "nonResourceAttributes": {"path": path, "verb": "get"},
        },
    }  # fmt: skip
    answer = await client.send("POST", paths.ACCESS_REVIEWS, requested, timeout_s=CALL_S)
    access = msgspec.json.decode(answer, type=AccessReview).status
    if access.allowed and not access.denied:
        return AccessDecision(HTTPStatus.OK, "ok")
    return AccessDecision(
        HTTPStatus.FORBIDDEN, f"{user.username} may not get {path}: it needs a ClusterRole with this nonResourceURL"
    )

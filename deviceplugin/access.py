"""Access to the metrics of this node: the API server reviews the tokens that clients of the plugin's and the arbiter's port send.

The arbiter has no credentials: it sends tokens here, through a socket in the plugin's folder.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any, Final

import structlog

from deviceplugin.settings import DevicePluginSettings
from kube.client import Client
from kube.review import may_get
from observe.access import Review
from observe.access_socket import serve_reviews
from observe.page import Page, text

METRICS: Final = "/metrics"

log = structlog.get_logger("deviceplugin.access")


def reviewer(client: Client) -> Review:
    """Has the API server review a token."""

    async def review(token: str) -> Page:
        verdict = await may_get(client, token, METRICS)
        return text(verdict.status, verdict.why)

    return review


def arbiters_reviews(settings: DevicePluginSettings, review: Review) -> Callable[[], Coroutine[Any, Any, None]]:
    """Serves the arbiter until cancelled."""

    async def serve() -> None:
        await serve_reviews(settings.access_socket, review, lambda what: log.warning("reviews of tokens", what=what))

    return serve

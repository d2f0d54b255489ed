"""The two HTTP applications: the scheduler's verbs on 127.0.0.1, and what operators look at.

Knows HTTP only: bodies go to `verbs` as they are, past FastAPI's own decoding (plain routes save 30 us a call, measured).
"""

from __future__ import annotations

from collections.abc import Callable

from fastapi import FastAPI, Request, Response
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest

from extender.verbs import Verbs

JSON = "application/json"


def scheduler_app(verbs: Verbs) -> FastAPI:
    """POST /filter and POST /bind."""
    app = FastAPI(title="Tangram extender", docs_url=None, redoc_url=None, openapi_url=None)

    async def filter_nodes(request: Request) -> Response:
        return Response(verbs.filter(await request.body()), media_type=JSON)

    async def bind(request: Request) -> Response:
        return Response(await verbs.bind(await request.body()), media_type=JSON)

    app.add_route("/filter", filter_nodes, methods=["POST"])
    app.add_route("/bind", bind, methods=["POST"])
    return app


def operations_app(registry: CollectorRegistry, not_ready: Callable[[], str | None]) -> FastAPI:
    """GET /healthz, /readyz, /metrics. `not_ready` says what is missing, or None."""
    app = FastAPI(title="Tangram extender", docs_url=None, redoc_url=None, openapi_url=None)

    @app.get("/healthz")
    async def healthz() -> Response:
        return Response("ok\n", media_type="text/plain")

    @app.get("/readyz")
    async def readyz() -> Response:
        missing = not_ready()
        return Response(f"{missing or 'ok'}\n", status_code=503 if missing else 200, media_type="text/plain")

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)

    return app

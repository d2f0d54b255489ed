"""The two HTTP applications: admission for the API server, and what operators look at.

Knows HTTP only: bodies go to `review` as they are. Admission has a port of its own, so that probes and scrapes need no TLS
and a network policy can tell them apart.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from fastapi import FastAPI, Request, Response
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from webhook.metrics import Metrics
from webhook.review import BadReview, review
from webhook.rules import Rules


def admission_app(rules: Rules, metrics: Metrics) -> FastAPI:
    """POST /mutate."""
    app = FastAPI(title="Tangram webhook", docs_url=None, redoc_url=None, openapi_url=None)

    @app.post("/mutate")
    async def mutate(request: Request) -> Response:
        body = await request.body()
        started = time.perf_counter()
        try:
            answer = review(body, rules)
        except BadReview as error:
            metrics.admissions.labels("bad_request").inc()
            return Response(f"{error}\n", status_code=400, media_type="text/plain")
        metrics.duration.observe(time.perf_counter() - started)
        metrics.admissions.labels(answer.result).inc()
        return Response(answer.body, media_type="application/json")

    return app


def operations_app(metrics: Metrics, not_ready: Callable[[], str | None]) -> FastAPI:
    """GET /healthz, /readyz, /metrics. `not_ready` says what is missing, or None."""
    app = FastAPI(title="Tangram webhook", docs_url=None, redoc_url=None, openapi_url=None)

    @app.get("/healthz")
    async def healthz() -> Response:
        return Response("ok\n", media_type="text/plain")

    @app.get("/readyz")
    async def readyz() -> Response:
        missing = not_ready()
        return Response(f"{missing or 'ok'}\n", status_code=503 if missing else 200, media_type="text/plain")

    @app.get("/metrics")
    async def metrics_page() -> Response:
        return Response(generate_latest(metrics.registry), media_type=CONTENT_TYPE_LATEST)

    return app

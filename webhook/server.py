"""The HTTP application for the API server: admission.

Knows HTTP only: bodies go to `review` as they are. Admission has a port of its own, so that probes and scrapes need no TLS
and a network policy can distinguish them.
"""

from __future__ import annotations

import time

from fastapi import FastAPI, Request, Response
from starlette.requests import ClientDisconnect

from webhook.admission_rules import AdmissionRules
from webhook.metrics import Metrics
from webhook.review import BadReview, review


def admission_app(rules: AdmissionRules, metrics: Metrics) -> FastAPI:
    """POST /mutate."""
    app = FastAPI(title="Tangram webhook", docs_url=None, redoc_url=None, openapi_url=None)

    @app.post("/mutate")
    async def mutate(request: Request) -> Response:
        try:
            body = await request.body()
        except ClientDisconnect:
            return Response(status_code=400)  # the client has gone
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

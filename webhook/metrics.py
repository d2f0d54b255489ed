"""What the webhook counts. Reads nothing, decides nothing."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from observe.refusals import Refusals


class Metrics:
    """One process's metrics, in a registry of their own so that a test can have several."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.refused = Refusals("webhook")
        self.registry.register(self.refused)
        self.admissions = Counter(
            "tangram_webhook_admissions", "Admission requests answered, by result: unchanged, mutated, denied, error, bad_request.",
            ["result"], registry=self.registry,
        )  # fmt: skip
        self.duration = Histogram(
            "tangram_webhook_admission_duration_seconds", "Time from an admission request's body to its answer.",
            registry=self.registry, buckets=(0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.05, 0.25, 1.0),
        )  # fmt: skip
        self.not_after = Gauge(
            "tangram_webhook_certificate_not_after_timestamp_seconds", "When the serving certificate in use expires.",
            registry=self.registry,
        )  # fmt: skip
        self.loads = Counter(
            "tangram_webhook_certificate_loads", "Serving certificates taken into use.", registry=self.registry
        )
        self.failures = Counter(
            "tangram_webhook_certificate_failures", "Rounds of certificate keeping that failed; the one in use stays.",
            registry=self.registry,
        )  # fmt: skip
        for result in ("unchanged", "mutated", "denied", "error", "bad_request"):
            self.admissions.labels(result)

"""The pages that operators and the kubelet read: `get` answers, and `operations` serves it.

/metrics   the registry, for Prometheus
/healthz   200 while the process makes progress: the kubelet restarts it otherwise
/readyz    200 while it can do its work, else 503 and a sentence that names what is missing
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Final

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Gauge, generate_latest

from observe.page import Page, text, unknown

COMMIT_ENV: Final = "TANGRAM_COMMIT"
"""Environment variable with the commit, set by the image."""
UNKNOWN: Final = "unknown"
"""Version or commit of a program that runs from a source tree."""


def nothing_missing() -> str:
    """For a program that is well whenever it answers."""
    return ""


@dataclass(frozen=True, slots=True)
class Pages:
    """The pages of one program. `not_alive` and `not_ready` return what is wrong; empty or None: nothing."""

    registry: CollectorRegistry
    not_ready: Callable[[], str | None] = nothing_missing
    not_alive: Callable[[], str | None] = nothing_missing

    def get(self, path: str) -> Page:
        """What to answer to GET `path`."""
        match path:
            case "/metrics":
                return Page(200, CONTENT_TYPE_LATEST, generate_latest(self.registry) + _build_info())
            case "/healthz":
                return _state(self.not_alive())
            case "/readyz":
                return _state(self.not_alive() or self.not_ready())
            case _:
                return unknown(path)


def build_registry() -> CollectorRegistry:
    """`tangram_build_info`, which every program exports."""
    registry = CollectorRegistry()
    info = Gauge(
        "tangram_build_info", "1, with the version and the commit that the program was built from.", ("version", "commit"), registry=registry
    )  # fmt: skip
    info.labels(_version(), os.environ.get(COMMIT_ENV, "") or UNKNOWN).set(1)
    return registry


@cache
def _build_info() -> bytes:
    return generate_latest(build_registry())


def _version() -> str:
    try:
        return version("tangram")
    except PackageNotFoundError:
        return UNKNOWN


def _state(wrong: str | None) -> Page:
    return text(503 if wrong else 200, wrong or "ok")

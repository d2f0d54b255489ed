"""The pages that operators and the kubelet look at, as values: `get` answers, and whatever HTTP server there is sends it.

/metrics   the registry, for Prometheus
/healthz   200 while the process turns: the kubelet restarts it otherwise
/readyz    200 while it can do its work, else 503 and a sentence that says what is missing
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest

PATHS: Final = ("/metrics", "/healthz", "/readyz")
_TEXT: Final = "text/plain; charset=utf-8"


def nothing_missing() -> str:
    """For a program that is well whenever it answers."""
    return ""


@dataclass(frozen=True, slots=True)
class Page:
    """An HTTP answer."""

    status: int
    content_type: str
    body: bytes


@dataclass(frozen=True, slots=True)
class Pages:
    """The pages of one program. `not_alive` and `not_ready` say what is wrong; empty or None: nothing."""

    registry: CollectorRegistry
    not_ready: Callable[[], str | None] = nothing_missing
    not_alive: Callable[[], str | None] = nothing_missing

    def get(self, path: str) -> Page:
        """What to answer to GET `path`."""
        match path:
            case "/metrics":
                return Page(200, CONTENT_TYPE_LATEST, generate_latest(self.registry))
            case "/healthz":
                return _state(self.not_alive())
            case "/readyz":
                return _state(self.not_alive() or self.not_ready())
            case _:
                return Page(404, _TEXT, f"{path}: there are {', '.join(PATHS)}\n".encode())


def _state(wrong: str | None) -> Page:
    return Page(503 if wrong else 200, _TEXT, f"{wrong or 'ok'}\n".encode())

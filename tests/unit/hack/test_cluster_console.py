"""Who builds for minutes says so."""

from __future__ import annotations

import threading

import pytest
from rich.console import Console

from hack.cluster import console


class Heard(Console):
    """Keeps what was said, and tells when a step was said to last."""

    def __init__(self, *, terminal: bool) -> None:
        super().__init__(record=True, force_terminal=terminal, quiet=False, width=100)
        self.lasts = threading.Event()

    def print(self, *objects: object, **more: object) -> None:
        super().print(*objects, **more)  # type: ignore[arg-type]
        if "(for " in " ".join(map(str, objects)):
            self.lasts.set()


def test_a_step_that_takes_long_says_what_it_is_and_for_how_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(console, "SAY_EVERY_S", 0.01)
    steps = console.Steps()
    steps.console = heard = Heard(terminal=False)
    with steps.step("build [kubernetes]"):
        assert heard.lasts.wait(60)
    first, second, *_, last = heard.export_text().splitlines()
    assert first == "  ... build [kubernetes]"
    assert second == "  ... build [kubernetes] (for 0 s)"
    assert last.startswith("  ok build [kubernetes] (")

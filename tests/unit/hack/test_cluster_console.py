"""A build of minutes prints its progress."""

from __future__ import annotations

import threading

import pytest
from rich.console import Console

from hack.cluster import console


class Heard(Console):
    """Keeps the output, and signals when a step was reported to last."""

    def __init__(self, *, terminal: bool) -> None:
        super().__init__(record=True, force_terminal=terminal, quiet=False, width=100)
        self.lasts = threading.Event()

    def print(self, *objects: object, **more: object) -> None:
        super().print(*objects, **more)  # type: ignore[arg-type]
        if "(for " in " ".join(map(str, objects)):
            self.lasts.set()


def test_a_long_step_prints_its_name_and_its_duration(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(console, "SAY_EVERY_S", 0.01)
    steps = console.Steps()
    steps.console = heard = Heard(terminal=False)
    with steps.step("build [kubernetes]"):
        assert heard.lasts.wait(60)
    first, second, *_, last = heard.export_text().splitlines()
    assert first == "  ... build [kubernetes]"
    assert second == "  ... build [kubernetes] (for 0 s)"
    assert last.startswith("  ok build [kubernetes] (")

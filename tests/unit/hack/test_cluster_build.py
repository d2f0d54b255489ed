"""Programs are built once, by the first caller, and belong to the caller."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from hack.cluster import build, caller
from hack.cluster.console import Steps
from hack.cluster.programs import PAUSE, Module


class Announced(Steps):
    """Signals when a step begins."""

    def __init__(self) -> None:
        super().__init__(quiet=True)
        self.began = threading.Event()

    @contextmanager
    def step(self, what: str) -> Iterator[None]:
        self.began.set()
        with super().step(what):
            yield


def test_two_callers_that_need_a_program_at_the_same_time_build_it_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled: list[str] = []
    steps = Announced()
    second = threading.Thread(target=lambda: build.build(tmp_path, [PAUSE], steps))

    def compile_while_another_comes(go: str, module: Module, folder: Path) -> None:
        compiled.append(module.name)
        if len(compiled) == 1:
            second.start()
            assert steps.began.wait(30)
        (folder / module.name).touch()

    monkeypatch.setattr(build, "_compile", compile_while_another_comes)
    monkeypatch.setattr(build, "find_go", lambda _: "go")
    programs = build.build(tmp_path, [PAUSE], Steps(quiet=True))
    second.join(30)
    assert not second.is_alive()
    assert compiled == ["pause"]
    assert programs["pause"].exists()


@pytest.mark.parametrize(
    ("runs_as", "environment", "found"),
    [
        (0, {"SUDO_UID": "1000"}, 1000),
        (0, {"SUDO_UID": "0"}, None),
        (0, {}, None),
        (0, {"SUDO_UID": "somebody"}, None),
        (1000, {"SUDO_UID": "1000"}, None),
    ],
)
def test_the_person_is_the_caller_through_sudo(
    monkeypatch: pytest.MonkeyPatch, runs_as: int, environment: dict[str, str], found: int | None
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: runs_as)
    assert caller.person(environment) == found


def test_folders_made_on_the_way_are_the_persons(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    owned: list[Path] = []
    monkeypatch.setattr(caller, "own_by_person", owned.append)
    caller.make_folder(tmp_path / "a" / "b")
    assert set(owned) == {tmp_path / "a", tmp_path / "a" / "b"}

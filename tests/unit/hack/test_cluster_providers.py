"""Which cluster is meant, and which commands kind gets. Kind itself is replaced by a command that writes down its arguments."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hack.cluster import __main__ as command_line
from hack.cluster import providers
from hack.cluster.console import Steps
from hack.cluster.layout import Layout

QUIET = Steps(quiet=True)


@pytest.fixture
def kinds(tmp_path: Path) -> Layout:
    """A state folder whose cluster is kind's."""
    layout = Layout(tmp_path / "state")
    layout.bin.mkdir(parents=True)
    (layout.bin / "kind").write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/asked\n[ ! -e {tmp_path}/fails ]\n')
    (layout.bin / "kind").chmod(0o755)
    layout.provider.write_text("kind\n")
    return layout


def requested(layout: Layout) -> list[str]:
    path = layout.state.parent / "asked"
    return path.read_text().splitlines() if path.exists() else []


def test_kind_makes_a_control_plane_and_workers_and_its_kubelet_takes_old_control_groups_where_docker_has_them() -> (
    None
):
    settings = providers.kind_settings(3, cgroups="2")
    assert settings["nodes"] == [{"role": "control-plane"}, {"role": "worker"}, {"role": "worker"}]
    assert "kubeadmConfigPatches" not in settings
    old = providers.kind_settings(1, cgroups="1")["kubeadmConfigPatches"]
    assert isinstance(old, list)
    assert json.loads(old[0])["failCgroupV1"] is False


def test_a_cluster_of_another_provider_is_in_the_way_unless_it_is_to_be_replaced(
    kinds: Layout, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ValueError, match=r"local requested, but the cluster in .* is kind's; .* make cluster-down"):
        providers.up(kinds, "local", 1, QUIET)
    assert requested(kinds) == []
    monkeypatch.delenv("KUBECONFIG", raising=False)
    with pytest.raises(ValueError, match="KUBECONFIG: empty is not a file"):
        providers.up(kinds, "existing", 1, QUIET, replace=True)
    assert [line.split()[:4] for line in requested(kinds)] == [["delete", "cluster", "--name", "tangram"]]
    assert not kinds.state.exists()


def test_what_kind_could_not_take_down_is_still_kinds(kinds: Layout) -> None:
    (kinds.state.parent / "fails").touch()
    with pytest.raises(RuntimeError, match="kind delete cluster: ended with 1"):
        providers.down(kinds, QUIET)
    assert providers.chosen(kinds) == "kind"


def test_images_go_to_kinds_nodes_by_its_own_command(kinds: Layout, tmp_path: Path) -> None:
    (tmp_path / "a.tar").touch()
    providers.load(kinds, [tmp_path / "a.tar"], QUIET)
    assert requested(kinds) == [f"load image-archive {tmp_path / 'a.tar'} --name tangram"]


def test_the_command_line_passes_on_the_output_of_a_failed_program(
    kinds: Layout, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (kinds.bin / "kubectl").write_text("#!/bin/sh\necho the server is on fire >&2\nexit 3\n")
    (kinds.bin / "kubectl").chmod(0o755)
    kinds.provider.write_text("existing\n")
    given = tmp_path / "given"
    given.write_text("apiVersion: v1\n")
    monkeypatch.setenv("KUBECONFIG", str(given))
    monkeypatch.setattr(providers, "_tools", lambda *_, **__: None)  # else they are built
    monkeypatch.setattr(sys, "argv", ["cluster", "--state", str(kinds.state), "up", "--provider", "existing"])
    monkeypatch.setattr(command_line, "become_root", lambda _: None)
    assert command_line.main() == 1
    assert "kubectl --kubeconfig" in (output := capsys.readouterr().err)
    assert output.endswith("get --raw /readyz ended with 3: the server is on fire\n")


@pytest.mark.parametrize(
    ("script", "options", "output"),
    [
        ("echo it burns >&2; exit 3", {"capture_output": True}, " ended with 3: it burns\n"),
        ("printf 'it burns \\377' >&2; exit 3", {"capture_output": True}, " ended with 3: it burns \ufffd\n"),
        ("echo it burns >&2; exit 3", {"capture_output": True, "text": True}, " ended with 3: it burns\n"),
        ("exit 3", {"capture_output": True}, " ended with 3\n"),
        ("exit 3", {"capture_output": True, "text": True}, " ended with 3\n"),
        ("exit 3", {}, " ended with 3\n"),
        ("exec sleep 9", {"timeout": 0.05}, " seconds\n"),
    ],
)
def test_the_command_line_prints_how_a_program_ended_whatever_was_kept_of_its_output(
    script: str,
    options: dict[str, Any],
    output: str,
    kinds: Layout,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(providers, "up", lambda *_, **__: subprocess.run(["sh", "-c", script], check=True, **options))
    monkeypatch.setattr(sys, "argv", ["cluster", "--state", str(kinds.state), "up"])
    monkeypatch.setattr(command_line, "become_root", lambda _: None)
    assert command_line.main() == 1
    reported = capsys.readouterr().err
    assert reported.startswith("up: ")
    assert ("timed out" in reported) is ("timeout" in options)
    assert reported.endswith(output)
    assert reported.count("\n") == 1


def test_kind_without_docker_is_an_error_before_anything_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(RuntimeError, match="Docker does not answer"):
        providers.up(Layout(tmp_path / "state"), "kind", 1, QUIET)
    assert not (tmp_path / "state").exists()

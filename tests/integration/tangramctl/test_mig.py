"""tangramctl mig on the fake driver: a file becomes the layout, or nothing changes."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.built import REPOSITORY
from tests.fake import FakeDriver, fake_driver

__all__ = ["fake_driver"]

FILE = """\
version: v1
mig-configs:
  off:
    - devices: all
      mig-enabled: false
  balanced:
    - device-filter: ["0x233510DE"]
      devices: all
      mig-enabled: true
      mig-devices: {"1g.18gb": 2, "2g.35gb": 1, "3g.71gb": 1}
    - device-filter: ["0x2BB510DE"]
      devices: all
      mig-enabled: true
      mig-devices: {"1g.24gb-me": 2, "2g.48gb+gfx": 1}
  small:
    - devices: [0]
      mig-enabled: true
      mig-devices: {"1g.18gb": 7}
  whole:
    - devices: [0]
      mig-enabled: true
      mig-devices: {"7g.141gb": 1}
"""


class Mig:
    def __init__(self, driver: FakeDriver, folder: Path) -> None:
        self.driver, self.folder = driver, folder
        self.file, self.checkpoint = folder / "mig.yaml", folder / "checkpoint"
        self.file.write_text(FILE)

    def run(self, verb: str, config: str, code: int = 0, file: Path | None = None) -> str:
        command = [
            sys.executable,
            "-m",
            "tangramctl",
            "mig",
            verb,
            "--config",
            config,
            "--driver-root",
            str(self.folder),
        ]
        if verb != "export":
            command += ["--file", str(file or self.file)]
        if verb in ("plan", "apply"):
            command += ["--kubelet-checkpoint", str(self.checkpoint)]
        env = self.driver.env(PYTHONPATH=str(REPOSITORY))
        done = subprocess.run(command, env=env, capture_output=True, text=True, check=False, timeout=100)
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout + done.stderr

    def layout(self, gpu: int = 0) -> list[str]:
        return sorted(one.model for one in self.driver.status() if one.gpu == gpu and one.gi is not None)

    def uuid(self, profile: str) -> str:
        return next(one.uuid for one in self.driver.status() if one.model == profile)


@pytest.fixture
def mig(fake_driver: Callable[[str], FakeDriver], tmp_path: Path) -> Callable[[str], Mig]:
    return lambda description: Mig(fake_driver(description), tmp_path)


def test_a_file_is_planned_applied_asserted_and_exported(mig):
    machine = mig("gpu h200\ngpu rtx-pro-6000\ngpu t4")
    planned = machine.run("plan", "balanced")
    assert "GPU 0: switch MIG mode on" in planned
    assert "GPU 1: create 2g.48gb+gfx at slice 6" in planned
    assert machine.layout() == []
    assert "MIG mode is off, must be on" in machine.run("assert", "balanced", 3)
    assert machine.run("apply", "balanced") == planned
    assert machine.layout(0) == ["1g.18gb", "1g.18gb", "2g.35gb", "3g.71gb"]
    assert machine.layout(1) == ["1g.24gb-me", "1g.24gb-me", "2g.48gb.gfx"]
    assert machine.run("assert", "balanced") == "the layout is as the file has it\n"
    assert machine.run("apply", "balanced") == "nothing to do\n"
    exported = machine.folder / "now.yaml"
    exported.write_text(machine.run("export", "current"))
    assert "devices: [2]\n      mig-enabled: false" in exported.read_text()
    machine.run("assert", "current", file=exported)
    machine.run("apply", "off")
    assert machine.layout(0) == machine.layout(1) == []
    assert "nothing" not in machine.run("apply", "current", file=exported)
    assert machine.layout(0) == ["1g.18gb", "1g.18gb", "2g.35gb", "3g.71gb"]


def test_an_instance_that_a_process_uses_stays_and_so_does_all_else(mig):
    machine = mig("gpu h200\nmig 0 3g.71gb 1g.18gb\nprocess 0:1 4711 100 train")
    said = machine.run("apply", "whole", 75)
    assert "nothing was changed: GPU 0" in said
    assert "3g.71gb at slice 4 (GPU instance 1) is in use by process 4711" in said
    assert machine.layout() == ["1g.18gb", "3g.71gb"]


def test_an_instance_that_a_pod_has_stays_though_no_process_runs(mig):
    machine = mig("gpu h200\nmig 0 3g.71gb")
    given = {
        "PodUID": "0b7c",
        "ContainerName": "main",
        "ResourceName": "tangram.sh/mig-3g.71gb",
        "DeviceIDs": {"-1": [machine.uuid("3g.71gb")]},
    }
    machine.checkpoint.write_text(json.dumps({"Data": {"PodDeviceEntries": [given]}}))
    assert "is in use by container main of pod 0b7c" in machine.run("apply", "small", 75)
    assert machine.layout() == ["3g.71gb"]
    machine.checkpoint.write_text("{}")
    assert "it is not known what pods use" in machine.run("apply", "small", 70)
    machine.checkpoint.write_text('{"Data": {"PodDeviceEntries": null}}')
    machine.run("apply", "small")
    assert machine.layout() == ["1g.18gb"] * 7


def test_one_gpu_that_refuses_keeps_every_gpu_as_it_is(mig):
    machine = mig("gpu h200\ngpu h200\nprocess 1 4711 100 train")
    assert "GPU 1" in machine.run("apply", "balanced", 75)
    assert machine.layout() == []


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('version: v1\nmig-configs:\n  a:\n    - devices: all\n      mig-enabled: true\n      mig-devices:\n        "1g.19gb": 1', "mig.yaml:7: no GPU is known"),
        ('version: v1\nmig-configs:\n  a:\n    - devices: [5]\n      mig-enabled: false', "mig.yaml:4: devices has GPU 5, this node has 0"),
        ("version: v1\nmig-configs: {b: [{devices: all, mig-enabled: false}]}", "no 'a', must be one of b"),
    ],
)  # fmt: skip
def test_a_bad_file_is_answered_with_its_line(mig, text, words):
    machine = mig("gpu h200")
    machine.file.write_text(text)
    assert words in machine.run("apply", "a", 2)


def test_a_profile_of_another_model_is_refused_with_those_of_this_one(mig):
    machine = mig("gpu h200")
    machine.file.write_text(
        'version: v1\nmig-configs: {a: [{devices: all, mig-enabled: true, mig-devices: {"1g.5gb": 1}}]}'
    )
    assert "it has no profile 1g.5gb, it has 1g.18gb" in machine.run("apply", "a", 75)


def test_a_gpu_without_mig_and_a_machine_without_a_driver(mig):
    machine = mig("gpu t4")
    assert "it has no MIG" in machine.run("plan", "small", 75)
    machine.driver.stop()
    assert "MIG of this machine's GPUs cannot be had" in machine.run("plan", "small", 69)

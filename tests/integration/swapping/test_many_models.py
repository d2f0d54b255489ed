"""examples/08-many-models on the fake driver at a 16th of its size: servers answer, every check is right, and the client prints a line for each class.

Where the arbiter serves bursts, the GPU has room for one of the three.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.built import REPOSITORY, shim_build
from tests.gpu.kit import burst
from tests.gpu.kit.machine import Lines, Machine, machine

EXAMPLE = REPOSITORY / "examples/08-many-models"
MODEL_MIB, GUARANTEE_MIB, LIMIT_MIB, GPU_MIB = 1024, 128, 1280, 1792
CLASSES = ("latency-critical", "standard", "best-effort")


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    monkeypatch.setenv("TANGRAM_SHIM_BUILD", str(shim_build()))
    size = f"memory_mib={GPU_MIB} context_mib=16" if burst.served() else "context_mib=16"
    with machine(True, 3 * MODEL_MIB, fake_options=size) as made:
        made.start_arbiter()
        made.wait_for_nvml()
        yield made


def serve(here: Machine, service_class: str) -> tuple[Lines, str]:
    """A server with its weights, and where it listens."""
    guarantee = GUARANTEE_MIB if burst.served() else LIMIT_MIB
    key = here.grant(guarantee, service_class=service_class, burst_mib=LIMIT_MIB)
    env = {"MODEL_MIB": str(MODEL_MIB), "PORT": "0", "HOST": "127.0.0.1", "CUDA_VISIBLE_DEVICES": "0"}
    started = here.lines([sys.executable, str(EXAMPLE / "server.py")], key, **env)
    assert started.process.stdout is not None
    ready = started.process.stdout.readline().decode()
    found = re.fullmatch(r"DriverModel, 1024 MiB, ready after [\d.]+ s: port (\d+)\n", ready)
    assert found, ready or started.errors()
    return started, f"127.0.0.1:{found[1]}"


def client(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(EXAMPLE / "client.py"), *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)


def test_three_servers_answer_on_one_gpu(here: Machine) -> None:
    servers = {name: serve(here, name) for name in CLASSES}
    words = [f"{name}={at}" for name, (_, at) in servers.items()]
    done = client("--seconds", "3", "--rate", "2", "--tokens", "2", *words)
    for started, _ in servers.values():
        started.kill()  # they serve without end
    assert done.returncode == 0, done.stdout + done.stderr
    head, *rows = done.stdout.splitlines()
    assert head.split()[:3] == ["CLASS", "REQUESTS", "FAILED"]
    assert [row.split()[0] for row in rows] == list(CLASSES)
    assert all(int(row.split()[1]) > 0 and row.split()[2] == "0" for row in rows)


def test_the_client_reports_a_server_that_has_ended(here: Machine) -> None:
    started, at = serve(here, "standard")
    started.kill()
    done = client("--seconds", "1", "--rate", "5", f"standard={at}")
    assert done.returncode == 1
    assert "ConnectionRefusedError" in done.stdout


def test_the_client_reports_a_wrong_check(tmp_path: Path) -> None:
    program = tmp_path / "wrong.py"
    program.write_text(
        f"import sys; sys.path.insert(0, {str(EXAMPLE)!r})\nimport server\n"
        "class Wrong:\n def token(self): pass\n def healthy(self): return False\n"
        "server.Handler.model = Wrong()\nmade = server.HTTPServer(('127.0.0.1', 0), server.Handler)\n"
        "print(made.server_port, flush=True)\nmade.serve_forever()\n"
    )
    with subprocess.Popen([sys.executable, str(program)], stdout=subprocess.PIPE, text=True) as wrong:
        assert wrong.stdout is not None
        done = client("--seconds", "1", "--rate", "5", f"standard=127.0.0.1:{wrong.stdout.readline().strip()}")
        wrong.kill()
    assert done.returncode == 1
    assert "the check at the end of the answer is" in done.stdout

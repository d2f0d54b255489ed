"""The arbiter as a program: its options, its metrics, its end."""

from __future__ import annotations

import http.client
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from arbiter.__main__ import main
from arbiter.metrics import ArbiterCollector
from tests.unit.arbiter.conftest import GPU, MIB, ArbiterNode, a_grant
from vgpu.protocol import wire

ROOT = Path(__file__).parents[3]


def start(folder: Path) -> tuple[subprocess.Popen[str], int]:
    process = subprocess.Popen(
        [sys.executable, "-m", "arbiter", "--grants-dir", str(folder), "--metrics-port", "0", "--metrics-host", "127.0.0.1", "--status-socket", str(folder / ".status.sock")],
        stderr=subprocess.PIPE, text=True, cwd=ROOT,
    )  # fmt: skip
    assert process.stderr is not None
    for line in process.stderr:
        record = json.loads(line)
        if record["event"] == "serving":
            return process, record["metrics_port"]
    raise AssertionError("it ended before it served")


def get(port: int, path: str) -> tuple[int, str]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    connection.request("GET", path)
    answer = connection.getresponse()
    text = answer.read().decode()
    connection.close()
    return answer.status, text


def test_it_serves_metrics_and_health_and_ends_cleanly_on_sigterm(node: ArbiterNode) -> None:
    node.allocate("k", a_grant())
    process, port = start(node.folder)
    try:
        client = node.process()
        client.lease(100 * MIB)
        assert get(port, "/healthz") == (200, "ok\n")
        status, text = get(port, "/metrics")
        assert status == 200
        labels = f'{{container="main",gpu_uuid="{GPU}",namespace="default",pod="a"}}'
        assert f"tangram_container_gpu_memory_limit_bytes{labels} 1.048576e+09" in text
        assert f"tangram_container_gpu_memory_leased_bytes{labels}" in text
        resident_kib = int(Path(f"/proc/{process.pid}/status").read_text().split("VmRSS:")[1].split()[0])
        assert resident_kib < 100 * 1024, f"RSS is {resident_kib} KiB: at most 100 MiB"
        process.send_signal(signal.SIGTERM)
        assert process.wait(10) == 0
        assert client.hung_up()
    finally:
        process.kill()
        process.communicate()


def test_metrics_count_limits_leases_uses_and_connections(node: ArbiterNode) -> None:
    server = node.start()
    node.allocate("k", a_grant())
    process = node.process()
    process.lease(300 * MIB)
    process.send(wire.Usage(0, 200 * MIB, 300 * MIB))
    process.lease(1)
    process.send(wire.Hold(0, wire.HoldState.STILL_OPEN, wire.Space.IPC, 7 * MIB, bytes(wire.KEY_BYTES)))
    process.lease(0)
    values = {s.name: s.value for family in ArbiterCollector(server).collect() for s in family.samples}
    expected = {
        "tangram_container_gpu_memory_limit_bytes": 1000 * MIB,
        "tangram_container_gpu_memory_leased_bytes": 300 * MIB + 1,
        "tangram_container_gpu_memory_used_bytes": 200 * MIB,
        "tangram_container_gpu_memory_context_bytes": 0,
        "tangram_container_gpu_memory_shared_bytes": 7 * MIB,
        "tangram_container_gpu_memory_over_limit_bytes": 0,
        "tangram_container_connections": 1,
        "tangram_arbiter_bad_packets_total": 0,
        "tangram_arbiter_kills_total": 0,
        "tangram_arbiter_nvml_up": 0,
    }
    assert {name: values[name] for name in expected} == expected


def test_help_describes_each_option(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    text = capsys.readouterr().out
    assert "--grants-dir" in text
    assert "TANGRAM_ARBITER_GRANTS_DIR" in text


def test_a_wrong_option_is_named_with_its_value(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--metrics-port", "99999"])
    assert "metrics_port is '99999': Input should be less than or equal to 65535" in capsys.readouterr().err


def test_settings_come_from_the_environment_too(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(os.environ, "TANGRAM_ARBITER_RECALL_WAIT_MS", "0")
    with pytest.raises(SystemExit):
        main([])
    assert "recall_wait_ms is '0'" in capsys.readouterr().err


HUNG = """
import os, sys, threading
import arbiter.memory.meter, arbiter.gputime.usage_check
import contextlib
import arbiter.__main__
from arbiter.__main__ import main
from arbiter.gputime.node_scheduler import NodeScheduler
from nvml.queries import Nvml
hung = threading.Barrier(3)

class Hangs:
    def call_all(self, _requests):
        hung.wait()
        threading.Event().wait()

def both_hang():
    try:
        hung.wait(60)
    except threading.BrokenBarrierError:
        os._exit(1)
    print("NVML hangs", flush=True)

close = NodeScheduler.close
NodeScheduler.close = lambda one: (print("every container runs", flush=True), close(one))
close_usage_check = arbiter.gputime.usage_check.UsageCheck.close
arbiter.gputime.usage_check.UsageCheck.close = lambda of: (print("NVML is waited for", flush=True), close_usage_check(of))
arbiter.__main__.nvml_source = lambda *_: contextlib.nullcontext(lambda: Nvml(Hangs()))
NodeScheduler.watched = lambda _: {"a": (frozenset({"0"}), frozenset())}
threading.Thread(target=both_hang, daemon=True).start()
main(sys.argv[1:])
"""


def test_it_ends_while_nvml_hangs_and_first_resumes_every_container(node: ArbiterNode) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", HUNG, "--grants-dir", str(node.folder), "--metrics-port", "0", "--metrics-host", "127.0.0.1", "--status-socket", str(node.folder / ".status.sock")],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline() == "NVML hangs\n"
        assert any('"serving"' in line for line in process.stderr)
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
        assert process.stdout.read() == "every container runs\nNVML is waited for\n"
    finally:
        process.kill()
        process.communicate()

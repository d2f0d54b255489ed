"""The host pool's program on the fake driver, with the file of the device plugin written by the test."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

from arbiter.swap.copier import Copier
from hack.waiting import eventually
from tests.built import shim_build
from tests.fake import start_fake_driver
from tests.ports import free_port
from vgpu.api.errors import BadDocument
from vgpu.api.host_pool import PoolStatus, SharedGpus, from_text, to_text

MIB = 2**20
FIRST, SECOND = (f"GPU-0000000{n}-aaaa-bbbb-cccc-00000000000{n}" for n in "ab")
BOOT_ID = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
LIMIT_S = 60.0


class Stand:
    """A node with two GPUs."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="hostpool-"))
        self.pools = Path(tempfile.mkdtemp(prefix="tangram-test-", dir="/dev/shm"))
        described = "".join(f"gpu h200 memory_mib=2048 context_mib=300 uuid={uuid}\n" for uuid in (FIRST, SECOND))
        self.driver = start_fake_driver(described, self.folder)
        self.copiers, self.shared = self.folder / "copiers", self.folder / "shared-gpus.json"
        self.port = free_port()
        self.process: subprocess.Popen[bytes] | None = None
        self.log = (self.folder / "log").open("wb")

    def share(self, *gpus: str, **more: Any) -> None:
        """What the device plugin writes."""
        fresh = self.folder / "fresh"
        fresh.write_bytes(to_text(SharedGpus(boot_id=more.pop("boot_id", BOOT_ID), gpus=gpus, **more)))
        fresh.replace(self.shared)

    def start(self, pool: str = "64Mi", *more: str, faults: str = "") -> subprocess.Popen[bytes]:
        """The program. Returns at once."""
        words = ["--pool", pool, "--reserve", "0", "--pool-dirs", str(self.pools), "--copiers-dir", str(self.copiers)]
        words += ["--shared-gpus", str(self.shared), "--copier", str(shim_build() / "tangram-copier")]
        words += ["--metrics-host", "127.0.0.1", "--metrics-port", str(self.port), *more]
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", "hostpool", *words],
            env=self.driver.env(TANGRAM_FAKE_FAULTS=faults, PYTHONPATH=os.environ.get("PYTHONPATH", str(Path.cwd()))),
            stderr=self.log,
        )
        return self.process

    def stop(self) -> int:
        """By SIGTERM. Returns the exit status."""
        assert self.process is not None
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(LIMIT_S)

    def status(self) -> PoolStatus | None:
        try:
            return from_text(PoolStatus, (self.copiers / "status.json").read_bytes())
        except (OSError, BadDocument):
            return None

    def until(self, judge: Callable[[PoolStatus], bool], what: str) -> PoolStatus:
        """Wait for a status."""

        def found() -> PoolStatus | None:
            assert self.process is not None
            assert self.process.poll() is None, f"the program ended: {self.said()}"
            status = self.status()
            return status if status is not None and judge(status) else None

        return eventually(found, what, timeout_s=LIMIT_S, every_s=0.05)

    def until_ready(self, *gpus: str) -> PoolStatus:
        """Wait until exactly these GPUs have a pool that is ready."""
        return self.until(
            lambda status: (
                [gpu.uuid for gpu in status.gpus if gpu.ready] == list(gpus) and len(status.gpus) == len(gpus)
            ),
            f"pools of {gpus}",
        )

    def said(self) -> str:
        return (self.folder / "log").read_text()

    def page(self, path: str) -> tuple[int, str]:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=10) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    def connect(self, gpu: str) -> Copier:
        return Copier(self.copiers / f"{gpu}.sock")

    def copier_pids(self) -> list[int]:
        assert self.process is not None
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        return [int(pid) for pid in children if "tangram-copier" in Path(f"/proc/{pid}/cmdline").read_text()]

    def end(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.stop()
        self.log.close()
        self.driver.stop()
        shutil.rmtree(self.folder)
        shutil.rmtree(self.pools)

"""A node whose containers may burst: the fake driver with its kernel side, a real arbiter and copier, and programs with the library."""

from __future__ import annotations

import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from arbiter.gputime.trials_file import BOOT_ID, text_of
from arbiter.swap.records_file import RecordsFile
from tests.built import REPOSITORY, fake_build, shim_build
from tests.fake import start_fake_driver
from tests.integration.swap.polling import LIMIT_S, until
from tests.line_process import LineProcess
from vgpu.api.burst import BurstLimits, burst_to_text
from vgpu.api.codec import grant_to_text
from vgpu.api.grant import Grant, GrantGpu
from vgpu.gputime.trial_verdict import FILE, ModelVerdict, TrialOutcome, Trials, TrialVerdict, trials_to_text
from vgpu.memory.swap_records import SwapRecord
from vgpu.protocol.status import BRIEF, ContainerStatus, StatusDocument, decode_status

GPUS = tuple(f"GPU-0000000{n}-aaaa-bbbb-cccc-00000000000{n}" for n in "ab")
GPU = GPUS[0]
MEMORY_MIB = 1024
POOL_MIB = 1536
PROGRAM = Path(__file__).with_name("program.py")
QUICK = Path(__file__).with_name("quick_arbiter.py")


def _sorted(sample: str) -> str:
    """Labels in the order of their names."""
    name, _, labels = sample.rstrip("}").partition("{")
    return f"{name}{{{','.join(sorted(labels.split(',')))}}}" if labels else name


class BurstProgram(LineProcess):
    """program.py, or another one, in a container."""

    def __init__(self, name: str, env: dict[str, str], path: Path = PROGRAM) -> None:
        super().__init__([str(path)], env)
        self.name = name
        assert self.answer("at its start") == "ready"

    def do(self, expression: str) -> Any:
        self.send(expression)
        return self.answer(f"in {expression}")


class BurstNode:
    """One machine. Of several GPUs each container has all, with the same guarantee and limit."""

    def __init__(self, memory_mib: int = MEMORY_MIB, pool_mib: int = POOL_MIB, arbiter: Sequence[str] = ("-m", "arbiter"), faults: str = "", gpus: int = 1, **env: str) -> None:  # fmt: skip
        """`faults`: of the copiers; `env`: of the arbiter."""
        self.pool_mib, self.words, self.gpus = pool_mib, arbiter, GPUS[:gpus]
        self.folder = Path(tempfile.mkdtemp(prefix="burst-"))
        self.pools = Path(tempfile.mkdtemp(prefix="tangram-test-", dir="/dev/shm"))
        text = "".join(f"gpu h200 memory_mib={memory_mib} context_mib=8 uuid={gpu}\n" for gpu in self.gpus)
        self.driver = start_fake_driver(text, self.folder)
        self.grants, self.copiers = self.folder / "grants", self.folder / "copiers"
        self.copiers.mkdir()
        self.programs: list[BurstProgram] = []
        trials = Trials(
            boot_id=text_of(BOOT_ID),
            driver="580.65.06",
            tried=(ModelVerdict("NVIDIA H200", self.gpus, TrialVerdict(TrialOutcome.WORKS)),),
        )
        (self.folder / FILE).write_text(trials_to_text(trials))
        self.others = [self._copier(faults, pool_mib, gpu) for gpu in self.gpus[1:]]
        """Copiers of the other GPUs."""
        self.copier = self.start_copier(faults)
        self.arbiter = self.start_arbiter(**env)

    def start_arbiter(self, **env: str) -> subprocess.Popen[bytes]:
        options = ["--grants-dir", str(self.grants), "--metrics-host", "127.0.0.1", "--metrics-port", "0", "--grace-ms", "200"]  # fmt: skip
        own = {"TANGRAM_ARBITER_BURST": "true", "TANGRAM_ARBITER_COPIERS_DIR": str(self.copiers), **env}
        own["LD_PRELOAD"] = str(fake_build() / "libfake-kernel.so")
        before = self.log().count("the copier is ready")
        with (self.folder / "arbiter.log").open("ab") as log:
            self.arbiter = subprocess.Popen(
                [sys.executable, *self.words, *options], env=self.driver.env(**own), cwd=REPOSITORY, stderr=log
            )
        until((self.folder / "status.sock").exists)
        self._readies = before
        if self.grants.exists() and any(self.grants.iterdir()):
            self._until_ready()
        return self.arbiter

    def _until_ready(self) -> None:
        """The arbiter connects to the copier of a GPU that some container has."""
        if self.copier.poll() is None:
            until(lambda: self.log().count("the copier is ready") >= self._readies + len(self.gpus), 20)

    def start_copier(self, faults: str = "", pool_mib: int | None = None) -> subprocess.Popen[bytes]:
        self.copier = self._copier(faults, pool_mib or self.pool_mib, GPU)
        return self.copier

    def kill_other(self) -> None:
        """Kill the copier of the last GPU, and start another one."""
        self.kill(self.others.pop())
        self.others.append(self._copier("", self.pool_mib, self.gpus[-1]))

    def _copier(self, faults: str, pool_mib: int, gpu: str) -> subprocess.Popen[bytes]:
        pool = "pool" if gpu == GPU else f"pool-{gpu}"
        words = [
            str(shim_build() / "tangram-copier"), "--gpu", gpu, "--socket", str(self.copiers / f"{gpu}.sock"), "--pool",
            str(self.pools / pool), "--pool-bytes", str(pool_mib << 20), "--libraries", str(self.driver.libraries),
        ]  # fmt: skip
        with (self.folder / "copier.log").open("ab") as log:
            return subprocess.Popen(words, env=self.driver.env(TANGRAM_FAKE_FAULTS=faults), stderr=log)

    def grant(self, name: str, guarantee_mib: int, limit_mib: int, service_class: str = "standard", wait_s: int = 30) -> Path:  # fmt: skip
        """Write a container's grant and its limits. A container over its limit is killed."""
        folder = self.grants / name
        folder.mkdir(exist_ok=True)
        self.limit(name, limit_mib, wait_s)
        gpus = tuple(GrantGpu(gpu, guarantee_mib, 0) for gpu in self.gpus)
        grant = Grant("default", name, f"uid-{name}", "main", gpus, service_class, over_limit_action="kill")
        (folder / ".grant").write_text(grant_to_text(grant))
        (folder / ".grant").rename(folder / "grant")
        until((folder / "arbiter.sock").exists)
        self._until_ready()
        return folder / "grant"

    def limit(self, name: str, limit_mib: int, wait_s: int = 30) -> None:
        """Write a container's limits, as the device plugin does."""
        folder, limits = self.grants / name, tuple(GrantGpu(gpu, limit_mib, 0) for gpu in self.gpus)
        (folder / ".burst").write_text(burst_to_text(BurstLimits(limits, wait_s)))
        (folder / ".burst").rename(folder / "burst")

    def readings(self) -> int:
        """Of NVML, that the arbiter has evaluated. Written a moment later."""
        trace = self.folder / "swap/trace.jsonl"
        return trace.read_text().count('"GpuSeen"') if trace.exists() else 0

    def run(self, name: str, guarantee_mib: int = 100, limit_mib: int = 900, service_class: str = "standard", wait_s: int = 30, path: Path = PROGRAM, **env: str) -> BurstProgram:  # fmt: skip
        """A program in a container of its own."""
        return self._started(name, self.grant(name, guarantee_mib, limit_mib, service_class, wait_s), path, **env)

    def join(self, program: BurstProgram) -> BurstProgram:
        """A further process of its container."""
        return self._started(program.name, self.grants / program.name / "grant")

    def metrics(self) -> dict[str, float]:
        """The arbiter's samples, by name and labels."""
        port = re.findall(r'"metrics_port": (\d+)', self.log())[-1]
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=LIMIT_S) as answer:
            lines = answer.read().decode().splitlines()
        pairs = (line.rpartition(" ") for line in lines if not line.startswith("#"))
        return {_sorted(name): float(value) for name, _, value in pairs}

    def _started(self, name: str, grant: Path, path: Path = PROGRAM, **env: str) -> BurstProgram:
        preload = f"{shim_build() / 'libtangram.so'}:{fake_build() / 'libfake-kernel.so'}"
        env = self.driver.env(LD_PRELOAD=preload, TANGRAM_GRANT=str(grant), PYTHONPATH=str(REPOSITORY), **env)
        program = BurstProgram(name, env, path)
        self.programs.append(program)
        return program

    def document(self, *, brief: bool = False) -> StatusDocument:
        with socket.socket(socket.AF_UNIX) as sock:
            if brief:
                sock.bind(f"{BRIEF}{secrets.token_hex(8)}")
            sock.connect(str(self.folder / "status.sock"))
            return decode_status(b"".join(iter(lambda: sock.recv(65536), b"")))

    def status(self, name: str) -> ContainerStatus | None:
        return next((one for one in self.document().containers if one.key == name), None)

    def log(self) -> str:
        file = self.folder / "arbiter.log"
        return file.read_text() if file.exists() else ""

    def records(self) -> Sequence[SwapRecord]:
        """What the arbiter has noted to be in the pool."""
        boot = text_of(BOOT_ID)
        return [one for gpu in self.gpus for one in RecordsFile(self.folder / "swap", gpu, boot).read().records]

    def away_mib(self, name: str) -> int:
        """What is in the pool of a container, by the records."""
        return sum(record.bytes for record in self.records() if record.name == name and record.stage == "away") >> 20

    def kill(self, process: subprocess.Popen[Any]) -> None:
        """As the kernel does when it needs the memory."""
        process.kill()
        process.wait()

    def descriptors(self) -> list[str]:
        """Descriptors of blocks that the arbiter and the copier have open."""
        found = []
        for process in (self.arbiter, self.copier, *self.others):
            for link in Path(f"/proc/{process.pid}/fd").iterdir():
                with suppress(FileNotFoundError):
                    found.append(str(link.readlink()))
        return [one for one in found if "fake-gpu-handle" in one]

    def swaps_out(self) -> int:
        """Orders to move memory to the pool until now."""
        return len(re.findall(r"swap out", self.log()))

    def true_mib(self, program: BurstProgram) -> int:
        """The driver's own count of a process."""
        lines = self.driver.ctl("status").splitlines()
        mine = [line for line in lines if f"pid={program.process.pid} " in line]
        return sum(int(number) for number in re.findall(r"used_mib=(\d+)", "\n".join(mine)))

    def misuses(self) -> str:
        """How the kernel driver was misused, in words; empty when it was not."""
        count, _, last = self.driver.ctl("kernel").splitlines()[0].partition(" ")
        return "" if count == "misuses=0" else last

    def report(self) -> str:
        """For the message of a failed wait."""
        records = "\n".join(map(str, self.records()))
        states = "\n".join(str(self.status(name.name)) for name in self.grants.iterdir())
        return f"{records}\n{states}\n{self.log()[-6000:]}"

    def close(self) -> None:
        for program in self.programs:
            program.end()
        ends = [self._ended(process) for process in (self.arbiter, self.copier, *self.others)]
        log = self.log()
        self.driver.stop()
        shutil.rmtree(self.folder)
        shutil.rmtree(self.pools)
        assert set(ends) <= {0, None}, f"arbiter and copier ended with {ends}\n{log[-3000:]}"

    @staticmethod
    def _ended(process: subprocess.Popen[Any]) -> int | None:
        """The exit status of a process that is asked to end; None: a test had killed it."""
        if process.poll() is not None:
            return None
        process.send_signal(signal.SIGCONT)
        process.terminate()
        return process.wait()


def two(node: BurstNode) -> tuple[BurstProgram, BurstProgram]:
    """Programs that do not fit together: the first is away. Their guarantee has room for a context (8 MiB) and for what is reserved for code and streams (16)."""
    first, second = node.run("first", 32, 200, wait_s=600), node.run("second", 32, 200, wait_s=600)
    for number, program in enumerate((first, second)):
        assert program.do(f"prepare(50, {number + 77})") == 0
    assert node.away_mib("first") > 0
    return first, second


@pytest.fixture
def node() -> Iterator[BurstNode]:
    made = BurstNode()
    yield made
    made.close()


@pytest.fixture
def small(request: pytest.FixtureRequest) -> Iterator[BurstNode]:
    """Quick turns on a GPU of 256 MiB. Its copier has the faults of the parameter."""
    made = BurstNode(256, 512, [str(QUICK)], getattr(request, "param", ""))
    yield made
    try:
        print(made.report())
    finally:
        made.close()

"""A node whose GPU time is shared: the fake driver with its kernel side, a real arbiter, and programs with the library."""

from __future__ import annotations

import json
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from arbiter.gputime.trials_file import BOOT_ID, text_of
from tests.built import REPOSITORY, fake_build, shim_build
from tests.fake import start_fake_driver
from tests.mounting import with_grant
from tests.signals import send_signal
from vgpu.api.codec import grant_to_text
from vgpu.api.grant import Grant, GrantGpu
from vgpu.gputime.trial_verdict import FILE, ModelVerdict, TrialOutcome, Trials, TrialVerdict, trials_to_text
from vgpu.protocol.status import GpuTimeStatus, decode_status

GPUS = tuple(f"GPU-0000000{n}-aaaa-bbbb-cccc-00000000000{n}" for n in range(4))
PROGRAM = Path(__file__).with_name("program.py")
COMMAND = (sys.executable, str(PROGRAM))


def until(what: Callable[[], Any], limit_s: float = 30.0) -> float:
    """Seconds until `what()` is true."""
    began = time.monotonic()
    while not what():
        assert time.monotonic() - began < limit_s, f"not within {limit_s} s"
        time.sleep(0.005)
    return time.monotonic() - began


class Program:
    """A container's process."""

    def __init__(self, env: dict[str, str], key: str, command: Sequence[str] = COMMAND) -> None:
        self.key = key
        self.process = subprocess.Popen(command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self.finish() == "ready"

    def start(self, expression: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(expression + "\n")
        self.process.stdin.flush()

    def finish(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, f"the program ended with {self.process.wait()}"
        return json.loads(line)

    def do(self, expression: str) -> Any:
        self.start(expression)
        return self.finish()

    def send(self, number: signal.Signals) -> None:
        send_signal(self.process.pid, number)

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout):
            assert stream is not None
            stream.close()


class Node:
    """One machine. `arbiter`: where the arbiter's packages are. `grant_text`: how the device plugin writes grants."""

    def __init__(
        self,
        library: Path,
        gpus: int = 1,
        *,
        arbiter: Path = REPOSITORY,
        grant_text: Callable[[Grant], str] = grant_to_text,
        module: str = "arbiter",
        grace_ms: int = 0,
    ) -> None:
        self._arbiter_sources, self._grant_text = arbiter, grant_text
        self._module, self._grace_ms = module, grace_ms
        self.folder = Path(tempfile.mkdtemp(prefix="gpu-time-"))
        lines = [f"gpu h200 uuid={uuid} context_mib=0" for uuid in GPUS[:gpus]]
        self.driver = start_fake_driver("\n".join(lines) + "\n", self.folder)
        self.grants = self.folder / "grants"
        self.kernel = str(fake_build() / "libfake-kernel.so")
        self.library = str(library)
        self.programs: list[Program] = []
        self.has_tried(ModelVerdict("NVIDIA H200", GPUS, TrialVerdict(TrialOutcome.WORKS)))
        self.arbiter = self.start_arbiter()

    def has_tried(self, *tried: ModelVerdict) -> None:
        """The verdicts of this boot, as the device plugin leaves them."""
        trials = Trials(boot_id=text_of(BOOT_ID), driver="580.65.06", tried=tried)
        (self.folder / FILE).write_text(trials_to_text(trials))

    def start_arbiter(self) -> subprocess.Popen[bytes]:
        options = [
            "--grants-dir",
            str(self.grants),
            "--metrics-host",
            "127.0.0.1",
            "--metrics-port",
            "0",
            "--grace-ms",
            str(self._grace_ms),
        ]
        env = self.driver.env(LD_PRELOAD=self.kernel, TANGRAM_ARBITER_CAP_UNREPORTED="true")
        with (self.folder / "arbiter.log").open("ab") as log:
            self.arbiter = subprocess.Popen(
                [sys.executable, "-m", self._module, *options], env=env, cwd=self._arbiter_sources, stderr=log
            )
        until((self.folder / "status.sock").exists, 30)  # a busy machine takes seconds to load a program
        return self.arbiter

    def grant(
        self, name: str, service_class: str = "standard", core: int = 0, gpus: int = 1, level: int = 2, first: int = 0
    ) -> Path:
        """Writes a container's grant, or writes it anew: of so many GPUs from the first on."""
        folder = self.grants / name
        folder.mkdir(exist_ok=True)
        shares = tuple(GrantGpu(uuid, 1024, core) for uuid in GPUS[first : first + gpus])
        grant = Grant("default", name, f"uid-{name}", "main", shares, service_class, level)
        fresh = folder / ".grant"
        fresh.write_text(self._grant_text(grant))
        fresh.rename(folder / "grant")
        until((folder / "arbiter.sock").exists)
        return folder / "grant"

    def run(self, name: str, service_class: str = "standard", core: int = 0, **env: str) -> Program:
        """A program in a container of its own. Its channels are known to the arbiter when this returns."""
        grant = self.grant(name, service_class, core)
        return self.run_in(grant, **env)

    def run_in(
        self, grant: Path, *, channels: bool = True, at: str = "", command: Sequence[str] = COMMAND, **env: str
    ) -> Program:
        """`channels`: of its own. Else there is no kernel's side of the driver for it, as far as it can see. `at`: where the grant is mounted
        in a root of its own; else a variable names it."""
        preload = f"{self.library}:{self.kernel}" if channels else self.library
        carried = {"LD_PRELOAD": preload, "TANGRAM_GRANT": str(grant), **env}
        if at:
            del carried["TANGRAM_GRANT"]
        command = with_grant(grant.parent, at, *command) if at else command
        program = Program(self.driver.env(**carried | env), grant.parent.name, command)
        self.programs.append(program)
        key = grant.parent.name
        carry = sum(1 for other in self.programs if other.key == key)
        until(lambda: not channels or ((gpu_time := self.gpu_time(key)) is not None and gpu_time.processes == carry))
        return program

    def gpu_time(self, key: str) -> GpuTimeStatus | None:
        """A container's GPU time in the arbiter's status."""
        with socket.socket(socket.AF_UNIX) as sock:
            sock.connect(str(self.folder / "status.sock"))
            document = b"".join(iter(lambda: sock.recv(65536), b""))
        return next(one.gpu_time for one in decode_status(document).containers if one.key == key)

    def log(self) -> str:
        return (self.folder / "arbiter.log").read_text()

    def ran_us(self, program: Program) -> int:
        """GPU time that a process had."""
        return self._of(program)["ran_us"]

    def ran_both_us(self, one: Program, other: Program) -> tuple[int, int]:
        """The same of two, at one moment."""
        seen = self._seen()
        return seen[one.process.pid]["ran_us"], seen[other.process.pid]["ran_us"]

    def held(self, program: Program) -> bool:
        return bool(self._of(program)["held"])

    def _of(self, program: Program) -> dict[str, int]:
        seen = self._seen()
        assert program.process.pid in seen, f"process {program.process.pid} has no channels"
        return seen[program.process.pid]

    def _seen(self) -> dict[int, dict[str, int]]:
        """What the kernel driver's double knows of each process, by pid, at one moment; of several GPUs together."""
        seen: dict[int, dict[str, int]] = {}
        for line in self.driver.ctl("kernel").splitlines()[1:]:
            numbers = {key: int(value) for key, value in re.findall(r"(\w+)=(\d+)", line)}
            of = seen.setdefault(numbers["pid"], dict.fromkeys(numbers, 0))
            for key, value in numbers.items():
                of[key] += value
        return seen

    def misuses(self) -> str:
        """How the kernel driver was misused, in words; empty when it was not."""
        count, _, last = self.driver.ctl("kernel").splitlines()[0].partition(" ")
        return "" if count == "misuses=0" else last

    def close(self) -> None:
        for program in self.programs:
            program.end()
        if self.arbiter.poll() is None:
            self.arbiter.send_signal(signal.SIGCONT)
            self.arbiter.terminate()
        self.arbiter.wait()
        self.driver.stop()
        shutil.rmtree(self.folder)


@pytest.fixture(scope="session")
def library() -> Path:
    return shim_build() / "libtangram.so"


@pytest.fixture
def node(library: Path) -> Iterator[Node]:
    made = Node(library)
    yield made
    made.close()

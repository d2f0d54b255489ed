"""A node in small: the fake driver, an arbiter as a process, a grant, and GPU programs that carry the library.

Everything is the real thing but the driver: programs find the library by LD_PRELOAD, the grant by TANGRAM_GRANT (there is no
/.tangram outside a container), and the fake driver by LD_LIBRARY_PATH.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from arbiter.gputime.trials_file import BOOT_ID, text_of
from tests.built import shim_build
from tests.integration.shim.reader import Reader
from tests.probe import Probe
from tests.signals import send_signal
from vgpu.api.codec import grant_to_text
from vgpu.api.grant import Grant, GrantGpu
from vgpu.gputime.trial_verdict import FILE, ModelVerdict, TrialOutcome, Trials, TrialVerdict, trials_to_text
from vgpu.protocol.status import ContainerStatus, decode_status

ROOT = Path(__file__).parents[3]
MIB = 2**20
OUT_OF_MEMORY = 2
INVALID_VALUE = 1
GPUS = tuple(f"GPU-0000000{n}-aaaa-bbbb-cccc-00000000000{n}" for n in range(2))
GPU_MIB = 16384
ROUTES = ("direct", "dlsym", "procaddr")


@pytest.fixture(scope="session")
def build() -> Path:
    """The library, the fake driver and the test programs. TANGRAM_SHIM_BUILD names a build made otherwise."""
    return shim_build()


class Worker:
    """A process of gpu.py: Python that calls the driver by ctypes."""

    def __init__(self, env: dict[str, str]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("gpu.py"))], env=env, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip

    def request(self, expression: str) -> list[Any]:
        """The CUresult, then the results."""
        self.start(expression)
        return self.finish()

    def start(self, expression: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(expression + "\n")
        self._process.stdin.flush()

    def finish(self) -> list[Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, f"the program ended with {self._process.wait()}: {self._process.communicate()[1]}"
        answer: list[Any] = json.loads(line)
        return answer

    def must(self, expression: str) -> Any:
        """The results; the call has to succeed."""
        code, *values = self.request(expression)
        assert code == 0, f"{expression}: CUresult {code}"
        return values[0] if values else None

    def free_mib(self) -> int:
        """cuMemGetInfo."""
        return int(self.must("info()"))

    @property
    def pid(self) -> int:
        return self._process.pid

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def end(self) -> str:
        """Lets it end by itself. What it wrote to stderr."""
        _, errors = self._process.communicate(timeout=60)
        assert self._process.returncode == 0, errors
        return errors

    def close(self) -> None:
        if self._process.poll() is None:
            self._process.kill()
        if self._process.stderr is not None and not self._process.stderr.closed:
            errors = self._process.communicate()[1]
            assert "Sanitizer" not in errors, errors


ARBITER = """
import json, sys
from arbiter.__main__ import main
print("loaded", file=sys.stderr, flush=True)
main(json.loads(sys.stdin.readline()))
"""


@dataclass
class Stage:
    """One container's surroundings. Its driver and arbiter are its own, or the session's."""

    build: Path
    folder: Path
    key: str = "k"
    """Of the container's grant directory."""
    prelude: str = ""
    """Program text that its arbiter executes before it starts."""
    arbiter_log: list[str] = field(default_factory=list, repr=False)
    """Lines that its own arbiter wrote."""
    _workers: list[Worker] = field(default_factory=list, repr=False)
    _probes: list[Probe] = field(default_factory=list, repr=False)
    _driver: subprocess.Popen[bytes] | None = None
    _arbiter: subprocess.Popen[str] | None = None
    _standby: subprocess.Popen[str] | None = None
    _drain: threading.Thread = field(default_factory=threading.Thread, repr=False)

    @property
    def library(self) -> str:
        """As LD_PRELOAD names it. A sanitized build wants its runtime first: TANGRAM_SHIM_RUNTIME."""
        return ":".join(filter(None, [os.environ.get("TANGRAM_SHIM_RUNTIME"), str(self.build / "libtangram.so")]))

    @property
    def without_threads(self) -> dict[str, str]:
        """Environment of a program whose library gets no helper thread."""
        return {"LD_PRELOAD": f"{self.library}:{self.build}/tests/libno_threads.so"}

    def start_driver(self, context_mib: int = 0, branch: str = "580") -> None:
        config = self.folder / "driver"
        gpu = f"gpu t4 memory_mib={GPU_MIB} context_mib={context_mib}"
        config.write_text(f"driver {branch}\n" + "".join(f"{gpu} uuid={uuid}\n" for uuid in GPUS))
        tried = ModelVerdict("Tesla T4", tuple(GPUS), TrialVerdict(TrialOutcome.WORKS))
        trials = Trials(boot_id=text_of(BOOT_ID), driver=branch, tried=(tried,))
        (self.folder / FILE).write_text(trials_to_text(trials))
        (self.folder / "root").mkdir()
        (self.folder / "root/lib").symlink_to(self.build.absolute() / "fake")
        path = self.folder / "driver.sock"
        program = self.build / "fake/nvidia-fake-driverd"
        self._driver = subprocess.Popen([program, "--config", config, "--socket", path])
        wait_for(path.exists)

    def start_arbiter(self, *options: str) -> None:
        """Reserves no memory beside contexts unless a test requests it, so that a difference of a MiB shows. Kills no process for bypassing
        the library."""
        if "--context-room-mib" not in options:
            options = ("--context-room-mib", "0", *options)
        if "--bypass" not in options:
            options = ("--bypass", "report", *options)
        self._arbiter, self._standby = self._standby or self._load_arbiter(), None
        assert self._arbiter.stdin is not None
        assert self._arbiter.stderr is not None
        given = ["--grants-dir", str(self.folder / "grants"), "--metrics-port", "0", *options]
        print(json.dumps(given), file=self._arbiter.stdin, flush=True)
        for line in self._arbiter.stderr:
            self.arbiter_log.append(line)
            if '"serving"' in line:
                break
        self._drain = threading.Thread(target=self.arbiter_log.extend, args=(self._arbiter.stderr,), daemon=True)
        self._drain.start()

    def _load_arbiter(self) -> subprocess.Popen[str]:
        """One that has everything loaded, and waits for its options."""
        return subprocess.Popen(
            [sys.executable, "-c", self.prelude + ARBITER], cwd=ROOT, stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env=os.environ | {"TANGRAM_FAKE_DRIVER": str(self.folder / "driver.sock")},
        )  # fmt: skip

    @property
    def measuring(self) -> tuple[str, str]:
        """Options of an arbiter that finds the fake driver's NVML."""
        return ("--driver-root", str(self.folder / "root"))

    def start_measuring_arbiter(self, *options: str) -> None:
        """One that reads the fake driver's NVML."""
        self.start_arbiter(*self.measuring, "--grace-ms", "200", *options)
        wait_for(lambda: any('"NVML is open"' in line for line in self.arbiter_log))

    def signal_arbiter(self, number: int) -> None:
        assert self._arbiter is not None
        send_signal(self._arbiter.pid, number)

    def status(self) -> ContainerStatus:
        """What the arbiter reports of this container."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
            sock.settimeout(10)
            sock.connect(str(self.folder / "status.sock"))
            document = b"".join(iter(lambda: sock.recv(65536), b""))
        (found,) = [c for c in decode_status(document).containers if c.key == self.key]
        return found

    def stop_arbiter(self, *, another: bool = False) -> None:
        """SIGKILL. With `another` one that is loaded is there to be started: a machine may take seconds for that, and the library
        waits 5 for one that went away.
        """
        if another:
            self._standby = self._load_arbiter()
            assert self._standby.stderr is not None
            assert self._standby.stderr.readline() == "loaded\n"
        if self._arbiter is not None:
            self._arbiter.kill()
            self._arbiter.wait()
            self._drain.join()
            self._arbiter.communicate()
            self._arbiter = None

    def grant(self, *gpus: tuple[str, int], key: str = "") -> None:
        self.write_grant(grant_to_text(Grant("default", "a", "1", "main", tuple(GrantGpu(*gpu) for gpu in gpus))), key)

    def write_grant(self, text: str, key: str = "") -> None:
        folder = self.folder / "grants" / (key or self.key)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / ".new").write_text(text)
        (folder / ".new").rename(folder / "grant")

    def env(self, key: str = "", **more: str) -> dict[str, str]:
        """Of a program in the container."""
        sanitizers = {name: value for name, value in os.environ.items() if name.endswith("SAN_OPTIONS")}
        return {
            **sanitizers,
            "PATH": os.environ["PATH"],
            "LD_LIBRARY_PATH": str(self.build / "fake"),
            "LD_PRELOAD": self.library,
            "TANGRAM_FAKE_DRIVER": str(self.folder / "driver.sock"),
            "TANGRAM_GRANT": str(self.folder / "grants" / (key or self.key) / "grant"),
            "TANGRAM_WAIT_MS": "5000",
            **more,
        }

    def probe(self, route: str = "direct", device: int = 0, key: str = "", **env: str) -> Probe:
        """A program that has a context on a device of its own numbering."""
        probe = self.bare_probe(route, key, **env)
        assert probe.request("use", device) == [0]
        return probe

    def worker(self, device: int = 0, key: str = "", **env: str) -> Worker:
        """A Python program with a context on a device."""
        worker = self.bare_worker(key, **env)
        assert worker.request(f"use({device})")[0] == 0
        return worker

    def bare_worker(self, key: str = "", **env: str) -> Worker:
        self._workers.append(Worker(self.env(key, **env)))
        return self._workers[-1]

    def driver_ctl(self, *words: str) -> str:
        """A control command of the fake driver."""
        program = self.build / "fake/nvidia-fake-driverd"
        command = [str(program), "ctl", "--socket", str(self.folder / "driver.sock"), *words]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    def true_mib(self, *workers: Worker) -> int:
        """What the driver counts as theirs, over all GPUs."""
        used = re.findall(r"pid=(\d+) used_mib=(\d+)", self.driver_ctl("status"))
        return sum(int(mib) for pid, mib in used if int(pid) in {worker.pid for worker in workers})

    def bare_probe(self, route: str = "direct", key: str = "", **env: str) -> Probe:
        program, pipe = self.build / f"tests/probe-{route}", subprocess.PIPE
        process = subprocess.Popen([program], env=self.env(key, **env), text=True, stdin=pipe, stdout=pipe, stderr=pipe)
        self._probes.append(Probe(process))
        return self._probes[-1]

    def python(self, program: str, **env: str) -> str:
        done = subprocess.run(
            [sys.executable, "-c", program],
            env=self.env(**env),
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def close(self) -> None:
        for worker in self._workers:
            worker.close()
        for probe in self._probes:
            probe.close()
        self.stop_arbiter()
        if self._driver is not None:
            self._driver.terminate()
            self._driver.wait()


def wait_for(condition: Callable[[], object], seconds: float = 30) -> None:
    """Polls what has no event to wait for."""
    pause = threading.Event()
    for _ in range(int(seconds * 200)):
        if condition():
            return
        pause.wait(0.005)
    raise AssertionError("it did not come about in time")


@contextlib.contextmanager
def a_node(build: Path, context_mib: int = 0, branch: str = "580", prelude: str = "") -> Iterator[Stage]:
    folder = Path(tempfile.mkdtemp(prefix="ts-"))  # a socket's path has at most 107 characters
    (folder / "grants").mkdir()
    node = Stage(build, folder, prelude=prelude)
    node.start_driver(context_mib, branch)
    yield node
    node.close()
    shutil.rmtree(folder)


@pytest.fixture(scope="session")
def node(build: Path) -> Iterator[Stage]:
    """A driver and an arbiter for all tests that leave them alone."""
    with a_node(build) as made:
        made.start_arbiter("--grace-ms", "0")
        yield made


_keys = itertools.count()


@pytest.fixture
def stage(node: Stage) -> Iterator[Stage]:
    """A container limited to 1000 MiB of the first GPU."""
    stage = Stage(node.build, node.folder, f"k{next(_keys)}")
    stage.grant((GPUS[0], 1000))
    yield stage
    stage.close()


@pytest.fixture
def bare_stage(build: Path) -> Iterator[Stage]:
    """A node of its own, with a driver; no grant, no arbiter."""
    with a_node(build) as made:
        yield made


@pytest.fixture
def own_stage(bare_stage: Stage) -> Stage:
    """A node of its own with a container limited to 1000 MiB of the first GPU; its arbiter may be stopped."""
    bare_stage.grant((GPUS[0], 1000))
    bare_stage.start_arbiter("--grace-ms", "0")
    return bare_stage


CONTEXT_MIB = 300


@pytest.fixture(scope="session")
def measured_node(build: Path) -> Iterator[Stage]:
    """Contexts cost CONTEXT_MIB, and the arbiter reads NVML."""
    with a_node(build, CONTEXT_MIB) as made:
        made.start_measuring_arbiter()
        yield made


@pytest.fixture
def measured(measured_node: Stage) -> Iterator[Stage]:
    """A container limited to 1000 MiB of the first GPU of such a node, whose arbiter has measured what a context takes."""
    stage = Stage(measured_node.build, measured_node.folder, f"m{next(_keys)}")
    stage.grant((GPUS[0], 1000))
    stage.worker().kill()
    yield stage
    stage.close()


@pytest.fixture
def own_measured(build: Path) -> Iterator[Stage]:
    """A node of its own of that kind: no context was ever made on it, and its arbiter may be stopped."""
    with a_node(build, CONTEXT_MIB) as made:
        made.grant((GPUS[0], 1000))
        made.start_measuring_arbiter()
        yield made


@pytest.fixture(scope="module")
def reader() -> Iterator[Reader]:
    """It ends with status 0: the sanitizers found nothing."""
    made = Reader()
    with made.process as process:
        yield made
        made.end()
    assert process.returncode == 0

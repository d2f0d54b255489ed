"""One GPU, an arbiter, grants, and processes held by them: what the checks on a real GPU stand on. No cluster.

The GPU is the machine's own, or the fake driver's (`fake=True`), on which everything but the frameworks runs, too. An arbiter
is a process over a folder of its own, as in tests/integration/shim; a container is a grant folder, and the processes started
with its environment and in its session.
"""

from __future__ import annotations

import contextlib
import datetime
import itertools
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from arbiter.gputime.trials_file import BOOT_ID, MODULE_VERSION, text_of
from tests.gpu.kit import burst
from tests.gpu.kit.lines import ANSWER_S, Container, Lines
from vgpu.gputime.trial_verdict import FILE, ModelVerdict, Trials, trials_to_text

ROOT = Path(__file__).parents[3]
KIT = Path(__file__).parent
MIB = 2**20
FAKE_UUIDS = tuple(f"GPU-0000000{n}-aaaa-bbbb-cccc-00000000000{n}" for n in "ab")
FAKE_UUID = FAKE_UUIDS[0]


@dataclass
class Machine:
    """See the module. `library` is libtangram.so, `build` where the shim was built."""

    folder: Path
    build: Path
    library: Path
    uuid: str
    fake: bool
    base: dict[str, str]
    uuids: tuple[str, ...] = ()
    """Of its GPUs, as many as `machine` was to use at most; `uuid` is the first."""
    burst: bool = False
    """Every container's memory is elastic, and its limit is what `grant` names, unless a test sets another."""
    swaps: bool = False
    """There is a copier with a pool."""
    served_by: list[int] = field(default_factory=list)
    """Processes of the node itself that have a context."""
    _running: list[Lines] = field(default_factory=list)
    _arbiter: subprocess.Popen[bytes] | None = None
    _log: IO[bytes] | None = None
    _grants: Iterator[int] = field(default_factory=lambda: itertools.count(1))

    @property
    def status_socket(self) -> Path:
        return self.folder / "status.sock"

    def has_tried(self, *tried: ModelVerdict) -> None:
        """The verdicts of this boot, as the device plugin leaves them. Of a fake driver only they have the version."""
        driver = text_of(MODULE_VERSION) or ("580.65.06" if self.fake else "")
        trials = Trials(boot_id=text_of(BOOT_ID), driver=driver, tried=tried)
        (self.folder / FILE).write_text(trials_to_text(trials))

    def start_arbiter(self, **settings: str) -> None:
        """TANGRAM_ARBITER_<NAME> settings; waits until it serves."""
        env = self.base | {
            "TANGRAM_ARBITER_GRANTS_DIR": str(self.folder / "grants"),
            "TANGRAM_ARBITER_METRICS_PORT": "0",
            "TANGRAM_ARBITER_GRACE_MS": "0",
            "TANGRAM_ARBITER_BYPASS": "report",
            "TANGRAM_ARBITER_STATUS_SOCKET": str(self.status_socket),
            **({"TANGRAM_ARBITER_DRIVER_ROOT": str(self.build / "fake")} if self.fake else {}),
            **{
                f"TANGRAM_ARBITER_{name.upper()}": value
                for name, value in ((burst.arbiter_settings(self.folder) if self.swaps else {}) | settings).items()
            },
        }
        log = self.folder / "arbiter.log"
        self._log = log.open("ab")
        began = log.stat().st_size
        self._arbiter = subprocess.Popen([sys.executable, "-m", "arbiter"], cwd=ROOT, env=env, stderr=self._log)

        def serving() -> bool:
            assert self._arbiter is not None
            if self._arbiter.poll() is not None:
                raise RuntimeError(f"the arbiter ended with {self._arbiter.returncode}: {self.arbiter_log()}")
            return b'"serving"' in log.read_bytes()[began:]

        self.wait_for(serving, "the arbiter to serve", 20)

    def wait_for_nvml(self) -> None:
        """Until the arbiter reads NVML: before that it cannot charge contexts. 120 s is its own limit for that start."""
        log = self.folder / "arbiter.log"
        self.wait_for(lambda: b'"NVML is open"' in log.read_bytes(), "the arbiter to read NVML", 120)

    def stop_arbiter(self) -> None:
        if self._arbiter is not None:
            self._arbiter.terminate()
            status = self._arbiter.wait(10)
            self._arbiter = None
            if status != 0:
                raise RuntimeError(f"the arbiter ended with status {status}: {self.arbiter_log()}")
        if self._log is not None:
            self._log.close()
            self._log = None

    def arbiter_log(self) -> str:
        return (self.folder / "arbiter.log").read_text(errors="replace")[-1500:]

    def grant(
        self,
        mib: int,
        *lines: str,
        service_class: str = "standard",
        core_percent: int = 0,
        burst_mib: int = 0,
        gpus: int = 1,
    ) -> str:
        """A new container held to so much of the GPU, or of each of several; its key. `lines` stand after `level`: `guard kill`, `clear yes`.

        `burst_mib`: its limit in all, `mib` is then its guarantee. 0: `mib` is the limit, and with `burst` as much of it as can be is elastic."""
        key = f"g{next(self._grants)}"
        folder = self.folder / "grants" / key
        folder.mkdir(parents=True)
        if self.burst and not burst_mib:
            burst_mib, mib = mib, mib - (burst.ABOVE_MIB if burst.served() else 0)
        if burst_mib:
            (folder / "burst").write_text(
                burst.burst_text((self.uuids or (self.uuid,))[:gpus], burst_mib, core_percent)
            )
        head = f"tangram-grant 1\npod gpu/{key}\nuid {key}\ncontainer main\nclass {service_class}\nlevel 2\n"
        middle = "".join(f"{line}\n" for line in lines)
        cards = "".join(
            f"card {uuid} mib={mib} core_percent={core_percent}\n" for uuid in (self.uuids or (self.uuid,))[:gpus]
        )
        (folder / ".new").write_text(f"{head}{middle}{cards}end\n")
        (folder / ".new").chmod(0o444)
        (folder / ".new").rename(folder / "grant")
        self.wait_for((folder / "arbiter.sock").exists, f"{folder}/arbiter.sock")
        return key

    @property
    def preload(self) -> str:
        """LD_PRELOAD in a container: the library, and on the fake driver its kernel side, which programs outside have too."""
        return ":".join(filter(None, [str(self.library), self.base.get("LD_PRELOAD")]))

    def env(self, key: str = "", **more: str) -> dict[str, str]:
        """Of a process in the container `key`; of one outside all containers, without the library, when it is empty."""
        inside = {
            "LD_PRELOAD": self.preload,
            "TANGRAM_GRANT": str(self.folder / "grants" / key / "grant"),
        }
        return self.base | (inside if key else {}) | more

    def container(
        self, key: str = "", way: str = "primary", fds: tuple[int, ...] = (), under: tuple[str, ...] = (), **env: str
    ) -> Container:
        """A process with a context made in one of `cuda.CONTEXTS`' ways; none for way ''. `under`: words of a program that starts it."""
        made = Container([*under, sys.executable, str(KIT / "container.py")], self.env(key, **env), fds)
        self._running.append(made)
        if way:
            code = made.request("start", way)
            if code:
                raise RuntimeError(f"a {way} context was refused with {code}: {made.errors()}")
        return made

    def adopt(self, made: Lines) -> None:
        """It ends with the others."""
        self._running.append(made)

    def lines(self, words: list[str], key: str = "", **env: str) -> Lines:
        made = Lines(words, self.env(key, **env))
        self._running.append(made)
        return made

    def output(self, words: list[str], key: str, text: str, **env: str) -> str:
        """What a program that reads `text` and ends printed. RuntimeError when it fails."""
        done = subprocess.run(
            words, env=self.env(key, **env), input=text, capture_output=True, text=True, check=False, timeout=ANSWER_S
        )
        if done.returncode:
            raise RuntimeError(f"{words} ended with {done.returncode}: {done.stderr[-400:]}")
        return done.stdout

    def probe(self, route: str) -> Path:
        """shim/tests/probe.c against this machine's libcuda: route direct, dlsym or procaddr."""
        made = self.folder / f"probe-{route}"
        if not made.exists():
            number = ("direct", "dlsym", "procaddr").index(route) + 1
            cuda = str(self.build / "fake/libcuda.so.1") if self.fake else _libcuda()
            words = [
                "gcc",
                "-std=c11",
                "-O1",
                "-D_GNU_SOURCE",
                "-pthread",
                f"-I{ROOT}/shim/include",
                f"-DROUTE={number}",
            ]
            linked = [cuda] if route == "direct" else ["-ldl"]
            subprocess.run([*words, "-o", str(made), str(ROOT / "shim/tests/probe.c"), *linked], check=True)
        return made

    def watcher(self) -> Watcher:
        made = Watcher(self.lines([sys.executable, str(KIT / "watch.py"), self.uuid]))
        assert made.lines.receive() == {"ready": True}
        return made

    def end_containers(self, keep: tuple[Lines, ...] = ()) -> None:
        for one in [one for one in self._running if one not in keep]:
            one.end()
            self._running.remove(one)

    @staticmethod
    def wait_for(condition: Any, what: str, seconds: float = 10) -> float:
        """Polls what has no event to wait for; seconds it took. TimeoutError."""
        began, pause = time.monotonic(), threading.Event()
        while not condition():
            if time.monotonic() - began > seconds:
                raise TimeoutError(f"{what}: not within {seconds} s")
            pause.wait(0.005)
        return time.monotonic() - began

    def describe(self) -> dict[str, str]:
        """Of every CSV: gpu, driver, date, commit."""
        requested = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
        smi = str(self.build / "fake/nvidia-smi") if self.fake else requested[0]
        output = subprocess.run([smi, *requested[1:]], env=self.base, capture_output=True, text=True, check=True).stdout
        name, driver = (word.strip() for word in output.splitlines()[0].split(","))
        git = subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False
        )
        commit = os.environ.get("TANGRAM_COMMIT") or git.stdout.strip() or "unknown"
        today = datetime.datetime.now(datetime.UTC).date().isoformat()
        return {
            "gpu": f"{name} (fake driver)" if self.fake else name,
            "driver": driver,
            "date": today,
            "commit": commit,
        }


@dataclass(frozen=True, slots=True)
class Watcher:
    """watch.py as a process. Bytes. Several threads may call it."""

    lines: Lines
    _turn: threading.Lock = field(default_factory=threading.Lock)

    def request(self, *words: Any) -> dict[str, Any]:
        with self._turn:
            self.lines.send(*words)
            return self.lines.receive()

    def now(self, *containers: Lines) -> int:
        """Of the containers that these are in."""
        return int(self.request("now", *{one.key for one in containers})["bytes"])

    def device_peak(self) -> int:
        return int(self.request("device")["bytes"])


def real_driver() -> bool:
    return Path("/dev/nvidiactl").exists()


@contextlib.contextmanager
def machine(
    fake: bool | None = None, pool_mib: int = 0, burst_all: bool = False, fake_options: str = "", gpus: int = 1
) -> Iterator[Machine]:
    """TANGRAM_LIBRARY names a libtangram.so made elsewhere, TANGRAM_SHIM_BUILD a build folder; else it is built.

    `pool_mib`: where the arbiter serves bursts, a copier has a pool of that size. `burst_all`: `Machine.burst`.
    `fake_options`: of the fake driver's GPUs. `gpus`: how many of the machine's are used at most."""
    fake = not real_driver() if fake is None else fake
    folder = Path(tempfile.mkdtemp(prefix="tg-"))  # a socket's path has at most 107 characters
    folder.chmod(0o755)
    (folder / "grants").mkdir()
    build, library = _built(folder, fake)
    base = {name: value for name, value in os.environ.items() if name not in ("LD_PRELOAD", "TANGRAM_GRANT")}
    base |= {"PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])), "HOME": "/tmp"}
    driver = None
    if fake:
        driver = _start_fake(folder, build, fake_options, gpus)
        base |= {
            "LD_LIBRARY_PATH": str(build / "fake"),
            "LD_PRELOAD": str(build / "fake/libfake-kernel.so"),
            "TANGRAM_FAKE_DRIVER": str(folder / "driver.sock"),
        }
    uuids = tuple((FAKE_UUIDS if fake else _uuids())[:gpus])
    swaps = pool_mib > 0 and burst.served()
    made = Machine(folder, build, library, uuids[0], fake, base, uuids, burst_all, swaps)
    made.has_tried()
    try:
        with contextlib.ExitStack() as stack:
            if made.swaps:
                kinds = burst.FAKE_POOL_KINDS if fake else burst.POOL_KINDS
                for uuid in made.uuids:
                    socket = Path(burst.arbiter_settings(folder)["copiers_dir"]) / f"{uuid}.sock"
                    copier, _ = stack.enter_context(burst.copier(build, uuid, socket, base, pool_mib, kinds))
                    made.served_by.append(copier.process.pid)
            stack.callback(made.stop_arbiter)
            stack.callback(made.end_containers)
            yield made
    finally:
        if driver is not None:
            driver.terminate()
            driver.wait()
        shutil.rmtree(folder, ignore_errors=True)


def _built(folder: Path, fake: bool) -> tuple[Path, Path]:
    build = Path(os.environ.get("TANGRAM_SHIM_BUILD", folder / "build"))
    library = Path(os.environ.get("TANGRAM_LIBRARY", build / "libtangram.so"))
    goals = [*([] if library.exists() else ["lib"]), *(["fake"] if fake else [])]
    if goals and "TANGRAM_SHIM_BUILD" not in os.environ:
        subprocess.run(["make", "-s", "-C", str(ROOT / "shim"), f"BUILD={build}", *goals], check=True)
    return build, library.resolve()


def _start_fake(folder: Path, build: Path, options: str, gpus: int) -> subprocess.Popen[bytes]:
    config, socket = folder / "driver", folder / "driver.sock"
    config.write_text("".join(f"gpu h200 uuid={uuid} {options}\n" for uuid in FAKE_UUIDS[:gpus]))
    started = subprocess.Popen([build / "fake/nvidia-fake-driverd", "--config", config, "--socket", socket])
    Machine.wait_for(socket.exists, "the fake driver's socket")
    return started


def _libcuda() -> str:
    listed = subprocess.run(["ldconfig", "-p"], capture_output=True, text=True, check=True).stdout
    return next(word for word in listed.split() if word.endswith("/libcuda.so.1"))


def _uuids() -> list[str]:
    requested = ["nvidia-smi", "--query-gpu=uuid", "--format=csv,noheader"]
    return subprocess.run(requested, capture_output=True, text=True, check=True).stdout.split()

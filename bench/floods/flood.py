"""One flood of one listener: 50 clients in half a processor, beside an honest client whose calls are timed."""

from __future__ import annotations

import contextlib
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from bench.process import cpu_s, memory_mib
from hack.cluster.build import SHARED_FLAGS
from hack.cluster.layout import cache_folder
from hack.cluster.toolchain import find_go

HERE: Final = Path(__file__).parent
CGROUP: Final = Path("/sys/fs/cgroup/tangram-floods")
EACH_S: Final = 0.02
"""Between two calls of an honest client that has much to do, as the scheduler, the API server and a container's process."""
PROBE_EACH_S: Final = 0.5
"""Between two probes or scrapes: five times as many as a kubelet with two probes each 5 s. An answer is a client's equal part of 200 a second, which is 4 beside 50
other addresses: a client with 50 a second would measure its own queue."""
WARM_S: Final = 2.0
CONTROL: Final = "burn"


@dataclass(frozen=True)
class Attack:
    """What the flooder does. `name` is the row's, `does` the flooder's word for it."""

    name: str
    does: str
    flags: tuple[str, ...] = ()


@dataclass(frozen=True)
class Second:
    """Another call of the honest client, that is timed apart."""

    name: str
    each_s: float
    """Between two of them."""
    call: Callable[[], float | None]
    """As a listener's."""


def twice(control_ms: float) -> float:
    """Goal for the programs that decide for the cluster: admission, filter and bind."""
    return 2 * control_ms


def beside(control_ms: float) -> float:
    """Goal for another container's allocations."""
    return control_ms + 50


def half_a_second(_control_ms: float) -> float:
    """Goal for a new connection to the listener that is flooded: half of what the kubelet waits for a probe by default."""
    return 500


@dataclass(frozen=True)
class Listener:
    """Something to attack, and its honest client. `pid` is the program's; its children count as its memory."""

    name: str
    pid: int
    flags: tuple[str, ...]
    """Of the flooder: where to."""
    attacks: tuple[Attack, ...]
    call: Callable[[], float | None]
    """One call of the honest client. Returns how long it took in ms, where it knows better than its caller. Raises OSError, AssertionError or ValueError when it failed."""
    second: Second | None = None
    goal_ms: Callable[[float], float] = twice
    """From the control's p99 to the most that p99 may be."""
    each_s: float = EACH_S
    """Between two of its calls."""
    others: tuple[Attack, ...] = ()
    """Attacks that the code meets as it does one of `attacks`, here or on a listener of the same kind."""


@dataclass
class Honest:
    """What the honest client saw."""

    ms: list[float] = field(default_factory=list)
    second_ms: list[float] = field(default_factory=list)
    failures: Counter[str] = field(default_factory=Counter)
    """Errors of failed calls."""
    mib: float = 0.0
    """Most resident memory of the program and its children."""
    cpu_percent: float = 0.0
    """Of a processor, that they took. Grows little with the machine's load."""
    did: str = ""
    """The flooder's own report."""

    def make(self, call: Callable[[], float | None], into: list[float]) -> None:
        started = time.perf_counter()
        try:
            took_ms = call()
        except (OSError, AssertionError, ValueError) as error:
            self.failures[f"{type(error).__name__}: {error}"[:80]] += 1
            return
        into.append((time.perf_counter() - started) * 1000 if took_ms is None else took_ms)


def quantile(ms: Sequence[float], percent: int) -> float:
    """Of what was seen; not a number when nothing was."""
    return sorted(ms)[len(ms) * percent // 100] if ms else float("nan")


def cgroup_of_half_a_processor() -> Path:
    CGROUP.mkdir(exist_ok=True)
    if (CGROUP / "cpu.max").exists():
        (CGROUP / "cpu.max").write_text("50000 100000")
        return CGROUP
    CGROUP.rmdir()
    v1 = Path("/sys/fs/cgroup/cpu/tangram-floods")
    v1.mkdir(exist_ok=True)
    (v1 / "cpu.cfs_quota_us").write_text("50000")
    return v1


def build_flooder() -> Path:
    program = cache_folder() / "bench" / "flooder"
    subprocess.run(
        [find_go(cache_folder()), "build", *SHARED_FLAGS, "-o", program, "."], cwd=HERE / "flooder", check=True
    )
    return program


def family(pid: int) -> list[int]:
    """The process and its children."""
    found = [pid]
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(OSError):
                found += [one for child in (task / "children").read_text().split() for one in family(int(child))]
    return found


def summed(pid: int, of: Callable[[int], float]) -> float:
    """Over the process and its children."""
    total = 0.0
    for one in family(pid):
        with contextlib.suppress(OSError, LookupError):
            total += of(one)
    return total


def flood(program: Path, cgroup: Path, listener: Listener, attack: Attack, seconds: int) -> Honest:
    """What the honest client saw, and the program used."""
    flags = [*listener.flags, "-attack", attack.does, "-seconds", str(seconds), *attack.flags]
    into_cgroup = ("/bin/sh", "-c", 'echo $$ > "$0" && exec "$@"', cgroup / "cgroup.procs")
    process = subprocess.Popen([*into_cgroup, program, *flags], stdout=subprocess.PIPE, text=True)
    seen, until_s = Honest(), time.monotonic() + seconds
    time.sleep(WARM_S)
    second_s = look_s = 0.0
    began_s, had_s = time.monotonic(), summed(listener.pid, cpu_s)
    while (now_s := time.monotonic()) < until_s:
        if listener.second is not None and now_s >= second_s:
            seen.make(listener.second.call, seen.second_ms)
            second_s = now_s + listener.second.each_s
        if now_s >= look_s:
            seen.mib = max(seen.mib, summed(listener.pid, memory_mib))
            look_s = now_s + 0.5
        seen.make(listener.call, seen.ms)
        time.sleep(max(0.0, listener.each_s - (time.monotonic() - now_s)))
    seen.cpu_percent = 100 * (summed(listener.pid, cpu_s) - had_s) / (time.monotonic() - began_s)
    seen.did = process.communicate(timeout=60)[0].strip()
    assert process.returncode == 0, f"the flooder ended with {process.returncode}"
    return seen

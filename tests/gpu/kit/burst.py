"""Bursts on one machine: the file `burst` beside a grant, the settings of an arbiter that serves bursts, and a copier with its pool.

An arbiter that does not serve bursts yet has no such settings. Then nothing is swapped and no copier is started: memory is elastic up to the
guarantee, as the library alone decides. `served` is the one switch between the two.
"""

from __future__ import annotations

import subprocess
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Final

from arbiter.settings import ArbiterSettings
from bench.memory_swap.pool_folder import pool_folder
from vgpu.api.burst import BurstLimits, burst_to_text
from vgpu.api.grant import GrantGpu

ROOT: Final = Path(__file__).parents[3]
MIB: Final = 2**20
SETTINGS: Final = ("burst", "copiers_dir", "swap_dir")
ABOVE_MIB: Final = 2
"""By which the limit in all is above the guarantee where only elastic memory is wanted: with equal numbers an arbiter leases no elastic memory.
One page of the driver, so that a check against the limit sees no difference."""
POOL_KINDS: Final = ("hugetlb", "transparent", "plain")
FAKE_POOL_KINDS: Final = ("plain",)
"""Tests of several processes at a time must not change the machine's reserve of huge pages."""
END_S: Final = 60.0


def served() -> bool:
    """Does the arbiter of this tree serve bursts?"""
    return set(SETTINGS) <= set(ArbiterSettings.model_fields)


def burst_text(uuids: Sequence[str], mib: int, core_percent: int = 0, wait_s: int = 600) -> str:
    """The file `burst`: a limit in all on each of these GPUs."""
    return burst_to_text(BurstLimits(tuple(GrantGpu(uuid, mib, core_percent) for uuid in uuids), wait_s))


def arbiter_settings(folder: Path) -> dict[str, str]:
    """TANGRAM_ARBITER_<NAME> settings of an arbiter that serves bursts; empty where there is none. Makes the folders."""
    if not served():
        return {}
    made = {"copiers_dir": folder / "copiers", "swap_dir": folder / "swap"}
    for path in made.values():
        path.mkdir(mode=0o700, exist_ok=True)
    return {"burst": "true"} | {name: str(path) for name, path in made.items()}


class Copier:
    """tangram-copier as a process, ready. Its stderr is read all the time."""

    def __init__(self, words: list[str], env: Mapping[str, str]) -> None:
        """Raises RuntimeError with its last line if it ends before it is ready."""
        self.process = subprocess.Popen(words, env=env, stderr=subprocess.PIPE, text=True)
        assert self.process.stderr is not None
        last = "it wrote nothing"
        for line in self.process.stderr:
            last = line.strip()
            if last.endswith(": ready"):
                break
        else:
            self.process.stderr.close()
            raise RuntimeError(f"the copier ended with {self.process.wait()}: {last}")
        self._drain = threading.Thread(target=self.process.stderr.read, daemon=True)
        self._drain.start()

    def end(self) -> None:
        """It answers its jobs before it ends."""
        self.process.terminate()
        try:
            self.process.wait(END_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self._drain.join()
        assert self.process.stderr is not None
        self.process.stderr.close()


def copier_program(build: Path) -> Path:
    """The program of a build folder; compiled there if it has none."""
    made = build / "tangram-copier"
    if not made.exists():
        build.mkdir(parents=True, exist_ok=True)
        sources = sorted(map(str, (ROOT / "shim/copier").glob("*.c")))
        flags = ["-std=c11", "-O2", "-D_GNU_SOURCE", "-pthread", f"-I{ROOT / 'shim/src'}"]
        subprocess.run(["gcc", *flags, "-o", str(made), *sources, "-ldl"], check=True)
    return made


@contextmanager
def copier(
    build: Path,
    uuid: str,
    socket: Path,
    env: Mapping[str, str],
    pool_mib: int,
    kinds: Sequence[str] = POOL_KINDS,
) -> Iterator[tuple[Copier, str]]:
    """A copier that is ready, with the first of these kinds of pool that this machine has memory for, and that kind.

    Raises RuntimeError with the reason of each kind if there is none. `pool_mib` is rounded up to whole pages of 2 MiB.
    """
    pool_mib += pool_mib % 2
    reasons = []
    program = copier_program(build)
    for kind in kinds:
        with ExitStack() as stack:
            try:
                pool = stack.enter_context(pool_folder(kind, pool_mib)) / "pool"
                words = [str(program), "--gpu", uuid, "--socket", str(socket), "--pool", str(pool)]
                made = Copier([*words, "--pool-bytes", str(pool_mib * MIB)], env)
            except (OSError, RuntimeError, subprocess.CalledProcessError) as error:
                reasons.append(f"{kind}: {error}")
                continue
            stack.callback(made.end)
            yield made, kind
            return
    raise RuntimeError(f"this machine has no memory for a pool of {pool_mib} MiB: {'; '.join(reasons)}")

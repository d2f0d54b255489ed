"""`tangramctl run`: grant this process a share of a GPU, then become the command.

Nothing of tangramctl stays behind in between, so exit code, signals, terminal and standard streams are the command's own.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import sys
import threading
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NoReturn

from nvml.errors import NvmlError
from nvml.queries import Nvml
from tangramctl import gpus, records, service
from tangramctl.choose import RunAllocation, choose
from tangramctl.errors import BadOption, Broken, CommandNotExecutable, NoCapacity, NoGpu, NotFound
from tangramctl.fake import faked
from tangramctl.library import COPIER, copier, fake_driver, library
from tangramctl.machine import DRIVER_LISTS, StateRoot, held, prepared, restrict_umask
from tangramctl.proc import GRANT_VARIABLE
from tangramctl.request import burst_mib, gpus_named, host_pool_mib, memory_mib, plain_hint
from tangramctl.request import request as request_of
from tangramctl.trial import try_out
from vgpu.api.burst import Burst, BurstLimits, limits_on_gpus
from vgpu.api.contract import BURST, GRANT_DIRS
from vgpu.api.grant import AssignedGpu
from vgpu.api.inventory import Inventory
from vgpu.api.request import PodRequest

WAIT_LOOK_S: Final = 0.5
GUARANTEE_ALONE: Final = "the run has what --gpu-mem guarantees, and no more"
_RESTORED: Final = ("SIGPIPE", "SIGXFSZ")
"""What Python ignores for itself, and a command must not inherit."""


@dataclass(frozen=True, slots=True)
class Options:
    """As `tangramctl run` was given them."""

    gpu_mem: str
    gpu_mem_burst: str | None
    host_pool: str | None
    gpu_core: int
    service_class: str
    level: int
    gpu: str | None
    wait: bool
    clear: bool
    verbose: bool
    fake: Path | None
    library: Path | None
    state: Path
    idle_s: float
    command: tuple[str, ...]


def run(options: Options) -> NoReturn:
    """Becomes the command. Raises CommandError when it cannot; what was granted by then ends with this process."""
    umask = restrict_umask()
    _refuse_inside()
    mib = memory_mib(options.gpu_mem)
    if options.gpu_mem_burst is not None:
        burst_mib(options.gpu_mem_burst, mib)
    if options.host_pool is not None:
        host_pool_mib(options.host_pool)
    request_of(mib, options.gpu_core, options.service_class, options.level, frozenset())
    preload = library(options.library)
    programs = None if options.fake is None else fake_driver(preload)
    path = _before(str(programs), os.environ.get("PATH")) if programs else os.environ.get("PATH")
    program = _program(options.command[0], path)
    machine = _machine(options, programs)
    with held(
        machine.wanted_lock, fcntl.LOCK_SH
    ):  # until the run is recorded and served, no keeper may end for lack of runs
        _await_driver(machine, options)
        granted = _granted(machine, mib, options, preload)
        sock = machine.grants / granted.key / "arbiter.sock"
        service.await_socket(machine, sock, options.idle_s)
        if (sock.parent / BURST).exists() and not service.await_bursts(machine, sock):
            print(f"tangramctl: --gpu-mem-burst: no arbiter with bursts answers: {GUARANTEE_ALONE}", file=sys.stderr)
    if options.verbose:
        print(_granted_text(granted, machine), file=sys.stderr)
    _become(program, options.command, _environment(machine, granted, preload), umask)


def _refuse_inside() -> None:
    grant = os.environ.get(GRANT_VARIABLE)
    for mount in map(Path, GRANT_DIRS):  # there in a container of a Tangram cluster only
        if mount.exists():
            raise BadOption(f"this is a container with a share of its own ({mount} is there): run the command as it is")
    if grant and Path(grant).exists():
        raise BadOption(f"this is inside a run already ({GRANT_VARIABLE} is {grant}): run the command as it is")


def _program(name: str, path: str | None) -> str:
    found = shutil.which(name, path=path)
    if found is not None:
        return found
    if os.sep in name and Path(name).exists():
        raise CommandNotExecutable(f"{name} cannot be executed: it is a folder, or lacks the right x")
    raise NotFound(f"{name or repr(name)}: no such command" + ("" if os.sep in name else " on PATH"))


def _machine(options: Options, programs: Path | None) -> StateRoot:
    machine = prepared(options.state)
    return machine if options.fake is None or programs is None else faked(machine, options.fake, programs)


def _await_driver(machine: StateRoot, options: Options) -> None:
    if machine.programs is None:
        return
    try:
        service.await_socket(machine, machine.driver_socket, options.idle_s)
    except Broken as error:
        _, named, why = str(error).partition(f"{machine.driver_config}:")
        if not named:
            raise
        where = f", line {why}" if why[:1].isdigit() else f", which{why}"  # else the whole file is meant
        raise BadOption(
            f"--fake is {options.fake}{where}; it must be a description of GPUs (docs/reference/fake-driver.md)"
        ) from None


def _granted(machine: StateRoot, mib: int, options: Options, preload: Path) -> records.Run:
    """Records the run; with --wait, waits for free memory first."""
    with gpus.driver(machine) as (inventory, nvml):
        try_out(machine, inventory, preload)
        request = request_of(mib, options.gpu_core, options.service_class, options.level, _allowed(options, inventory))
        full: NoCapacity | None = None
        try:
            return _grant(machine, inventory, nvml, request, options, preload)
        except NoCapacity as error:
            if not options.wait:
                raise NoCapacity(f"{error}\nwait for free memory with --wait, or request less") from None
            full = error
        with _progress() as show:
            pause = threading.Event()
            while True:
                show(str(full))
                pause.wait(WAIT_LOOK_S)
                try:
                    return _grant(machine, inventory, nvml, request, options, preload)
                except NoCapacity as error:
                    full = error


def _allowed(options: Options, inventory: Inventory) -> frozenset[str]:
    """The GPUs that may be chosen; empty = any. What the caller's environment hides stays hidden."""
    if options.gpu is not None:
        return gpus_named(options.gpu, inventory, "--gpu")
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return frozenset()
    if visible.strip() in ("", "-1", "NoDevFiles"):
        raise NoGpu(f"CUDA_VISIBLE_DEVICES is {visible!r}, which hides every GPU: unset it, or give --gpu")
    return gpus_named(visible, inventory, "CUDA_VISIBLE_DEVICES")


def _find_copier(machine: StateRoot, options: Options, preload: Path) -> bool:
    """Name the copier to the keeper. Without one nothing can be swapped, so nothing is above the guarantee."""
    if options.gpu_mem_burst is None:
        return False
    program = copier(preload)
    if program is None:
        print(
            f"tangramctl: --gpu-mem-burst: there is no {COPIER} beside {preload}, which moves memory to the host: {GUARANTEE_ALONE}",
            file=sys.stderr,
        )
        return False
    fresh = machine.copier_file.with_suffix(".new")
    fresh.write_text(f"{program}\n{host_pool_mib(options.host_pool) if options.host_pool else 0}\n")
    fresh.rename(machine.copier_file)
    return True


def _grant(
    machine: StateRoot, inventory: Inventory, nvml: Nvml, request: PodRequest, options: Options, preload: Path
) -> records.Run:
    try:
        usages = gpus.usages(inventory, nvml)  # outside the lock: a driver may hang
    except NvmlError as error:
        raise NoGpu(f"the GPUs of this machine cannot be read: {error}") from None
    with machine.locked():
        there = records.runs(machine)
        held = [RunAllocation(run.assigned, f"pid {run.pid}, {run.name[:60]}") for run in there]
        foreign = gpus.foreign_mib(usages, {str(machine.grant(run.key)) for run in there})
        assigned = choose(request, inventory, held, foreign, plain_hint(options.gpu_mem))
        burst = _burst(options, inventory, assigned, held, foreign) if _find_copier(machine, options, preload) else None
        terms = records.RunTerms(
            request.service_class, request.level, options.clear, _model(inventory, assigned), burst
        )
        return records.write(machine, options.command, assigned, terms)


def _burst(
    options: Options, inventory: Inventory, assigned: AssignedGpu, held: list[RunAllocation], foreign: Mapping[str, int]
) -> BurstLimits | None:
    """What the run may use above its share: of the GPU, what other runs are not granted and no other process uses now."""
    gpu = inventory.gpu(assigned.uuid)
    if options.gpu_mem_burst is None or gpu is None:
        return None
    others = sum(run.assigned.mib for run in held if run.assigned.uuid == assigned.uuid) + foreign.get(assigned.uuid, 0)
    burst = Burst(burst_mib(options.gpu_mem_burst, assigned.mib), assigned.core_percent)
    limits, why = limits_on_gpus(burst, [assigned], {assigned.uuid: gpu.mib - others})
    if why:
        print(f"tangramctl: --gpu-mem-burst: {why}", file=sys.stderr)
    return limits


def _model(inventory: Inventory, assigned: AssignedGpu) -> str:
    gpu = inventory.gpu(assigned.uuid)
    return gpu.model if gpu is not None else ""


def _progress() -> Any:
    """On a terminal a line that changes; elsewhere one line."""
    if not sys.stderr.isatty():
        printed: list[str] = []

        def once(text: str) -> None:
            if not printed:
                printed.append(text)
                print(f"tangramctl: waiting: {text}", file=sys.stderr, flush=True)

        return nullcontext(once)
    from tangramctl.screen import spinner

    return spinner()


def _environment(machine: StateRoot, granted: records.Run, preload: Path) -> dict[str, str]:
    """The command's: the caller's own, with the library, the grant and the GPU."""
    env = _own_environment()
    for name, value in machine.driver_env().items():
        env[name] = _before(value, env.get(name)) if name in DRIVER_LISTS else value
    if machine.programs is not None:
        env["PATH"] = _before(str(machine.programs), env.get("PATH"))  # nvidia-smi
    env["LD_PRELOAD"] = _before(str(preload), env.get("LD_PRELOAD"))
    env[GRANT_VARIABLE] = str(machine.grant(granted.key))
    env["CUDA_VISIBLE_DEVICES"] = granted.uuid
    return env


def _own_environment() -> dict[str, str]:
    """As the caller gave it: Python sets LC_CTYPE in its own copy where the locale is C (PEP 538)."""
    given = Path("/proc/self/environ").read_bytes().split(b"\0")
    names = {word.partition(b"=")[0] for word in given}
    return {name: value for name, value in os.environ.items() if name != "LC_CTYPE" or b"LC_CTYPE" in names}


def _before(first: str, rest: str | None) -> str:
    return f"{first}:{rest}" if rest else first


def _granted_text(run: records.Run, machine: StateRoot) -> str:
    core = f", {run.core_percent} % of its time" if run.core_percent else ""
    return (
        f"tangramctl: {run.mib} MiB{core} of GPU {run.index} ({run.model}, {run.uuid}); "
        f"{run.service_class}, level {run.level}; grant {machine.grant(run.key)}"
    )


def _become(program: str, command: tuple[str, ...], env: Mapping[str, str], umask: int) -> NoReturn:
    for name in _RESTORED:
        signal.signal(getattr(signal, name), signal.SIG_DFL)
    sys.stdout.flush()
    sys.stderr.flush()
    os.umask(umask)
    try:
        os.execve(program, command, env)
    except OSError as error:
        raise CommandNotExecutable(f"{program} cannot be executed: {error.strerror}") from None

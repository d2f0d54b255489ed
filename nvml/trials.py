"""Before the first share of a GPU model is offered in this boot: does its driver suspend? The arbiter reads what is found here.

The device plugin makes the trials, and without a cluster tangramctl. A trial runs in processes of its own (`python -m arbiter.gputime.suspend_trial`), as a
call of an unknown driver may never return: after `LIMIT_S` they are killed, and that is a verdict, too. A trial that could not run is
made again by the next `Trier`; every other verdict stands until the next boot, driver or model.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import Final

from nvml.library import library_folder
from vgpu.api.errors import BadDocument
from vgpu.api.inventory import Gpu, Inventory
from vgpu.gputime.trial_verdict import (
    FILE,
    ModelVerdict,
    TrialOutcome,
    Trials,
    TrialVerdict,
    trials_from_text,
    trials_to_text,
    verdict_from_text,
)

LIMIT_S: Final = 45.0
"""Of one trial, which takes a second, or some seconds where no process keeps the GPU initialised. Guessed."""
CHECK_MIB: Final = "TANGRAM_TRIAL_CHECK_MIB"
"""The trial program allocates so much memory, and copies and compares it."""
SELF_TEST_MIB: Final = 64
"""Guessed: seen in milliseconds, and more than the caches of any GPU of today (60 MB on Hopper)."""
END_S: Final = 5.0
"""How long killed processes are waited for. A process that the kernel does not let go is left behind."""
BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")
MODULE_VERSION: Final = Path("/sys/module/nvidia/version")


class Trier:
    """Has each GPU model tried that has no verdict yet, and keeps the verdicts in the state folder.

    `report` is called with each verdict, the model and the driver. `env` is added to the trial's environment. `again`: what could not run is
    made again, once by each `Trier`.
    """

    def __init__(
        self, state_root: Path, program: Path, driver_root: Path, *, report: Callable[[TrialVerdict, str, str], None],
        env: Mapping[str, str] = MappingProxyType({}), limit_s: float = LIMIT_S,
        again: bool = True,
    ) -> None:  # fmt: skip
        self._path, self._program, self._driver_root = state_root / FILE, program, driver_root
        self._report, self._env, self._limit_s, self._again = report, env, limit_s, again
        self._given_up: set[str] = set()
        """Models whose trial could not run since this start: not made again, so that no probe waits for one."""

    def untried(self, inventory: Inventory) -> list[str]:
        """The models that the next `try_out` tries."""
        trials = self._read(inventory)
        return [model for model, _ in _by_model(inventory) if self._verdict(trials, model) is None]

    async def try_out(self, inventory: Inventory) -> None:
        """Returns when every model that is shared has a verdict. Raises OSError when the verdicts cannot be written."""
        trials = self._read(inventory)
        for model, gpus in _by_model(inventory):
            verdict = self._verdict(trials, model)
            if verdict is None:
                verdict = await self._run(gpus[0].uuid)
                self._report(verdict, model, trials.driver)
                if verdict.outcome is TrialOutcome.CANNOT_RUN:
                    self._given_up.add(model)
            uuids = dict.fromkeys(
                (*(gpu.uuid for gpu in gpus), *trials.uuids_of(model))
            )  # pods may still run on one that is offered no more
            tried = ModelVerdict(model, tuple(uuids), verdict)
            others = tuple(one for one in trials.tried if one.model != model)
            trials = Trials(boot_id=trials.boot_id, driver=trials.driver, tried=(*others, tried))
        self._write(trials_to_text(trials).encode())

    def _verdict(self, trials: Trials, model: str) -> TrialVerdict | None:
        """That stands."""
        before = trials.of_model(model)
        could_not = before is not None and before.outcome is TrialOutcome.CANNOT_RUN
        return None if could_not and self._again and model not in self._given_up else before

    def _write(self, text: bytes) -> None:
        """Whole or not at all."""
        if self._path.exists() and self._path.read_bytes() == text:
            return
        fresh = self._path.with_name(f".{self._path.name}.new")
        fresh.write_bytes(text)
        fresh.chmod(0o644)
        fresh.replace(self._path)

    async def self_test(self, uuid: str) -> TrialVerdict:
        """Try one GPU, with its memory too. No verdict is kept."""
        return await self._run(uuid, {CHECK_MIB: str(SELF_TEST_MIB)})

    async def _run(self, uuid: str, more: Mapping[str, str] = MappingProxyType({})) -> TrialVerdict:
        command = [sys.executable, "-P", "-m", "arbiter.gputime.suspend_trial", "--program", str(self._program)]
        if folder := library_folder(self._driver_root):
            command += ["--libraries", str(folder)]
        env = {**os.environ, **self._env, **more, "CUDA_VISIBLE_DEVICES": uuid, "CUDA_CACHE_DISABLE": "1"}
        try:
            process = await asyncio.create_subprocess_exec(
                *command, env=env, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE,
                start_new_session=True,
            )  # fmt: skip
        except OSError as error:
            return TrialVerdict(TrialOutcome.CANNOT_RUN, f"the trial cannot be started: {error}")
        try:
            output, _ = await asyncio.wait_for(process.communicate(), self._limit_s)
        except TimeoutError:
            return TrialVerdict(TrialOutcome.HUNG, f"the trial was not over within {self._limit_s:g} s")
        finally:
            await _end(process)
        try:
            return verdict_from_text(output)
        except BadDocument:
            return TrialVerdict(
                TrialOutcome.CANNOT_RUN, f"the trial ended with status {process.returncode} and no verdict"
            )

    def _read(self, inventory: Inventory) -> Trials:
        boot_id, driver = _text_of(BOOT_ID), _text_of(MODULE_VERSION) or inventory.driver
        with suppress(OSError, BadDocument):
            trials = trials_from_text(self._path.read_bytes())
            if (trials.boot_id, trials.driver) == (boot_id, driver):
                return trials
        return Trials(boot_id=boot_id, driver=driver)


async def _end(process: asyncio.subprocess.Process) -> None:
    """With all that it started: the trial program is in its session."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    with suppress(TimeoutError):
        await asyncio.wait_for(process.wait(), END_S)


def _by_model(inventory: Inventory) -> Iterator[tuple[str, list[Gpu]]]:
    """Healthy GPUs that are shared. MIG instances are allocated whole, so no container is suspended there."""
    models: dict[str, list[Gpu]] = {}
    for gpu in inventory.gpus:
        if gpu.shareable:
            models.setdefault(gpu.model, []).append(gpu)
    yield from models.items()


def _text_of(path: Path) -> str:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""

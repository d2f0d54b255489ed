"""Before the first share of a GPU model is offered in this boot: does its driver suspend? The arbiter reads what is found here.

The trial runs in processes of its own (`python -m arbiter.trial`), as a call of a driver that nobody knows may never return: after
`LIMIT_S` they are killed, and that is a verdict, too. A trial that could not run is made again when the plugin starts anew or the machine
is probed; every other verdict stands until the next boot, driver or model.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final

import structlog

from deviceplugin.files import write_whole
from nvml.library import library_folder
from vgpu.errors import BadDocument
from vgpu.inventory import Card, Inventory
from vgpu.trial import FILE, Outcome, Trials, Tried, Verdict, trials_from_text, trials_to_text, verdict_from_text

LIMIT_S: Final = 45.0
"""Of one trial, which takes a second, or some seconds where nobody keeps the GPU initialised. Guessed."""
END_S: Final = 5.0
"""How long killed processes are waited for. A process that the kernel does not let go is left behind."""
BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")
MODULE_VERSION: Final = Path("/sys/module/nvidia/version")

log = structlog.get_logger("deviceplugin.trials")


class Trier:
    """Has each GPU model tried that has no verdict yet, and keeps the verdicts in the state folder."""

    def __init__(self, state_root: Path, program: Path, driver_root: Path, *, limit_s: float = LIMIT_S) -> None:
        self._path, self._program, self._driver_root, self._limit_s = state_root / FILE, program, driver_root, limit_s
        self._given_up: set[str] = set()
        """Models whose trial could not run since this start: not made again, so that no probe waits for one."""

    async def try_out(self, inventory: Inventory) -> None:
        """Returns when every model that is shared has a verdict. Raises OSError when the verdicts cannot be written."""
        trials = self._read()
        for model, cards in _by_model(inventory):
            before = trials.of_model(model)
            if before is None or (before.outcome is Outcome.CANNOT_RUN and model not in self._given_up):
                verdict = await self._try(cards[0])
                if verdict.outcome is Outcome.CANNOT_RUN:
                    self._given_up.add(model)
            else:
                verdict = before
            tried = Tried(model, tuple(card.uuid for card in cards), verdict)
            others = tuple(one for one in trials.tried if one.model != model)
            trials = Trials(boot_id=trials.boot_id, driver=trials.driver, tried=(*others, tried))
        text = trials_to_text(trials).encode()
        if not self._path.exists() or self._path.read_bytes() != text:
            write_whole(self._path, text, 0o644)

    async def _try(self, card: Card) -> Verdict:
        verdict = await self._run(card.uuid)
        say = log.info if verdict.outcome is Outcome.WORKS else log.warning
        say(
            "tried whether the driver suspends", outcome=verdict.outcome, why=verdict.why, model=card.model,
            driver=_text_of(MODULE_VERSION), suspend_us=round(verdict.suspend_us), resume_us=round(verdict.resume_us),
        )  # fmt: skip
        return verdict

    async def _run(self, uuid: str) -> Verdict:
        command = [sys.executable, "-m", "arbiter.trial", "--program", str(self._program)]
        if folder := library_folder(self._driver_root):
            command += ["--libraries", str(folder)]
        env = {**os.environ, "CUDA_VISIBLE_DEVICES": uuid, "CUDA_CACHE_DISABLE": "1"}
        try:
            process = await asyncio.create_subprocess_exec(
                *command, env=env, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE,
                start_new_session=True,
            )  # fmt: skip
        except OSError as error:
            return Verdict(Outcome.CANNOT_RUN, f"the trial cannot be started: {error}")
        try:
            said, _ = await asyncio.wait_for(process.communicate(), self._limit_s)
        except TimeoutError:
            return Verdict(Outcome.HUNG, f"the trial was not over within {self._limit_s:g} s")
        finally:
            await _end(process)
        try:
            return verdict_from_text(said)
        except BadDocument:
            return Verdict(Outcome.CANNOT_RUN, f"the trial ended with status {process.returncode} and no verdict")

    def _read(self) -> Trials:
        boot_id, driver = _text_of(BOOT_ID), _text_of(MODULE_VERSION)
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


def _by_model(inventory: Inventory) -> Iterator[tuple[str, list[Card]]]:
    """Healthy cards that are shared. MIG instances are given whole, so nobody is suspended there."""
    models: dict[str, list[Card]] = {}
    for card in inventory.cards:
        if card.shareable:
            models.setdefault(card.model, []).append(card)
    yield from models.items()


def _text_of(path: Path) -> str:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""

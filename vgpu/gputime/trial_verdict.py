"""The verdict of a trial: whether this driver suspends on this model of GPU, and how the arbiter acts on it.

The device plugin runs the trial once per boot for each driver and model, before it allocates a share of such a GPU, and writes the document;
the arbiter reads it. A verdict of another boot or driver does not count. Verdicts are by model and list the GPUs of that model, because a
grant identifies a GPU by its UUID alone.

    outcome      known driver                         another driver
    works        suspended                            suspended
    no-suspend   launch gating, `no-suspend`          launch gating, `no-suspend`
    hung         launch gating, `no-suspend`          launch gating, `no-suspend`
    cannot-run   suspended: "known, not tried"        launch gating, `unknown-driver`
    none         as cannot-run                        as cannot-run
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum
from typing import Final

import msgspec

from vgpu.api.enforcement import Reason, gating_points
from vgpu.api.errors import BadDocument

VERSION: Final = 1
FILE: Final = "trials.json"
"""In the state folder, which is not mounted in containers."""


class TrialOutcome(StrEnum):
    """The outcome of a trial."""

    WORKS = "works"
    NO_SUSPEND = "no-suspend"
    HUNG = "hung"
    """The trial did not end by itself: a call of the driver did not return."""
    FAULTY = "faulty"
    """What was copied to the GPU did not come back, or a copy failed. Only a self-test finds that; it is no verdict about a driver."""
    CANNOT_RUN = "cannot-run"
    """The trial shows nothing about the driver: no further context fits the GPU, or the driver's CUDA library is missing."""


class TrialVerdict(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """The result of one trial. Counts: how far the kernel counted in 20 ms, the worst of some rounds; times are medians."""

    outcome: TrialOutcome
    why: str = ""
    before: int = 0
    during: int = 0
    after: int = 0
    suspend_us: float = 0.0
    resume_us: float = 0.0


class ModelVerdict(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A verdict, and the GPUs to which it applies."""

    model: str
    uuids: tuple[str, ...]
    verdict: TrialVerdict


class Trials(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All verdicts of one boot and driver."""

    v: int = VERSION
    boot_id: str = ""
    driver: str = ""
    tried: tuple[ModelVerdict, ...] = ()

    def of_model(self, model: str) -> TrialVerdict | None:
        """None = no trial was made on that model."""
        return next((one.verdict for one in self.tried if one.model == model), None)

    def uuids_of(self, model: str) -> tuple[str, ...]:
        """GPUs of that model that have its verdict."""
        return next((one.uuids for one in self.tried if one.model == model), ())

    def of_gpu(self, uuid: str) -> TrialVerdict | None:
        """None = no trial was made on that GPU's model."""
        return next((one.verdict for one in self.tried if uuid in one.uuids), None)


class Suspendability(msgspec.Struct, frozen=True):
    """How the arbiter enforces GPU time on some GPUs. With a `reason` it delays launches instead of suspending."""

    reason: Reason | None = None
    why: str = ""
    """A clause for the operator; also if the arbiter suspends without a trial. Empty = the trial succeeded."""
    gating_points: float | None = None
    """`vgpu.api.enforcement.gating_points`."""


def verdict_to_text(verdict: TrialVerdict) -> str:
    """One line."""
    return msgspec.json.encode(verdict).decode()


def verdict_from_text(text: str | bytes) -> TrialVerdict:
    """Raises BadDocument."""
    try:
        return msgspec.json.decode(text, type=TrialVerdict)
    except (msgspec.MsgspecError, UnicodeError) as error:
        raise BadDocument(f"verdict of a trial: {error}") from None


def trials_to_text(trials: Trials) -> str:
    """The file's content."""
    return msgspec.json.encode(trials).decode() + "\n"


def trials_from_text(text: str | bytes) -> Trials:
    """Raises BadDocument, also for a version that is newer than this one."""
    try:
        trials = msgspec.json.decode(text, type=Trials)
    except (msgspec.MsgspecError, UnicodeError) as error:
        raise BadDocument(f"{FILE}: {error}") from None
    if trials.v != VERSION:
        raise BadDocument(f"{FILE}: version {trials.v}, not {VERSION}")
    return trials


def suspendability(
    trials: Trials | None, uuids: Iterable[str], *, boot_id: str, driver: str, known: bool
) -> Suspendability:
    """For these GPUs together: one on which the driver cannot suspend decides, because a container runs and stops on all of its GPUs."""
    if trials is not None and (trials.boot_id, trials.driver) != (boot_id, driver):
        trials = None
    answers = [_of_one(None if trials is None else trials.of_gpu(uuid), driver, known=known) for uuid in uuids]
    answer = max(answers, key=_weight, default=Suspendability())
    return msgspec.structs.replace(answer, gating_points=gating_points(driver, len(answers)) if answer.reason else None)


def _weight(answer: Suspendability) -> tuple[bool, bool]:
    return answer.reason is not None, bool(answer.why)


def _of_one(verdict: TrialVerdict | None, driver: str, *, known: bool) -> Suspendability:
    if verdict is not None and verdict.outcome is TrialOutcome.WORKS:
        return Suspendability()
    if verdict is not None and verdict.outcome in (TrialOutcome.NO_SUSPEND, TrialOutcome.HUNG):
        return Suspendability(
            Reason.NO_SUSPEND, f"suspending was tried and does not work: {verdict.why or verdict.outcome}"
        )
    not_tried = verdict.why if verdict is not None else "no trial was made on this GPU"
    if known:
        return Suspendability(None, f"driver {driver} is known, not tried: {not_tried}")
    what = f"driver {driver} is not known" if driver else "the driver's version cannot be read"
    return Suspendability(Reason.UNKNOWN_DRIVER, f"{what}, and it could not be tried: {not_tried}")

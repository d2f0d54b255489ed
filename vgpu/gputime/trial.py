"""The verdict of a trial: does this driver suspend on this model of GPU? And what follows from it for an arbiter.

The device plugin has the trial made once a boot for each driver and model, before a share of such a GPU is given, and writes the document;
the arbiter reads it. A verdict of another boot or driver says nothing. Verdicts are by model, and name the GPUs of that model, as a
grant knows a GPU by its UUID alone.

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
"""In the state folder, which containers do not see."""


class Outcome(StrEnum):
    """Of a trial."""

    WORKS = "works"
    NO_SUSPEND = "no-suspend"
    HUNG = "hung"
    """It did not end by itself: a call of the driver did not return."""
    CANNOT_RUN = "cannot-run"
    """It says nothing about the driver: the GPU takes no further context, or the driver's CUDA library is missing."""


class Verdict(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """Of one trial. Counts are how far the kernel came in 20 ms, the worst of some rounds; times are medians."""

    outcome: Outcome
    why: str = ""
    before: int = 0
    during: int = 0
    after: int = 0
    suspend_us: float = 0.0
    resume_us: float = 0.0


class Tried(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A verdict, and the GPUs that it is for."""

    model: str
    uuids: tuple[str, ...]
    verdict: Verdict


class Trials(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All verdicts of one boot and driver."""

    v: int = VERSION
    boot_id: str = ""
    driver: str = ""
    tried: tuple[Tried, ...] = ()

    def of_model(self, model: str) -> Verdict | None:
        """None = that model was not tried."""
        return next((one.verdict for one in self.tried if one.model == model), None)

    def of_gpu(self, uuid: str) -> Verdict | None:
        """None = nothing of that model was tried."""
        return next((one.verdict for one in self.tried if uuid in one.uuids), None)


class Suspending(msgspec.Struct, frozen=True):
    """What an arbiter does on some GPUs. With a `reason` it delays launches instead of suspending."""

    reason: Reason | None = None
    why: str = ""
    """A clause for people; also where it suspends without a trial. Empty = tried, and it works."""
    gating_points: float | None = None
    """`vgpu.api.enforcement.gating_points`."""


def verdict_to_text(verdict: Verdict) -> str:
    """One line."""
    return msgspec.json.encode(verdict).decode()


def verdict_from_text(text: str | bytes) -> Verdict:
    """Raises BadDocument."""
    try:
        return msgspec.json.decode(text, type=Verdict)
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


def suspending(trials: Trials | None, uuids: Iterable[str], *, boot_id: str, driver: str, known: bool) -> Suspending:
    """On these GPUs together: one that cannot be suspended decides, as a container runs and stops on all of its GPUs."""
    if trials is not None and (trials.boot_id, trials.driver) != (boot_id, driver):
        trials = None
    answers = [_of_one(None if trials is None else trials.of_gpu(uuid), driver, known=known) for uuid in uuids]
    answer = max(answers, key=_weight, default=Suspending())
    return msgspec.structs.replace(answer, gating_points=gating_points(driver, len(answers)) if answer.reason else None)


def _weight(answer: Suspending) -> tuple[bool, bool]:
    return answer.reason is not None, bool(answer.why)


def _of_one(verdict: Verdict | None, driver: str, *, known: bool) -> Suspending:
    if verdict is not None and verdict.outcome is Outcome.WORKS:
        return Suspending()
    if verdict is not None and verdict.outcome in (Outcome.NO_SUSPEND, Outcome.HUNG):
        return Suspending(
            Reason.NO_SUSPEND, f"suspending was tried and does not work: {verdict.why or verdict.outcome}"
        )
    not_tried = verdict.why if verdict is not None else "no trial was made on this GPU"
    if known:
        return Suspending(None, f"driver {driver} is known, not tried: {not_tried}")
    what = f"driver {driver} is not known" if driver else "the driver's version cannot be read"
    return Suspending(Reason.UNKNOWN_DRIVER, f"{what}, and it could not be tried: {not_tried}")

"""Two jobs at once against one after the other, on a GPU that has room for one of them.

    jobs        80 GB each, and 20 GB each. Quanta are the arbiter's own: they follow from what a change of places moves
    nvshare     the pairs of published.py
    uvm         the same pairs in unified memory (cuMemAllocManaged), without any product, ended after nine minutes

One after the other is measured in the same command: each program alone, in a container that is guaranteed all of its memory. Only work counts, not the start of programs.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from bench.memory_swap import published
from bench.memory_swap.figures import Figure
from bench.memory_swap.session import Session
from bench.memory_swap.swap_node import Job, Node

UVM_STOP_S = 540.0
"""Specified: the issue's nine minutes."""
UVM_LATE_S = 30.0
"""So late after the budget's beginning a pair may still begin: ten minutes less nine, and the ballast."""
CALIBRATION_STEPS = 3
FAKE_SOLO_S, FAKE_PHASES, FAKE_UVM_STOP_S = 3.0, 3, 20.0


@dataclass(frozen=True, slots=True)
class Case:
    """One pair of two equal jobs."""

    name: str
    total_bytes: int
    goal: float
    solo_s: float
    """What one job takes alone, about."""
    guaranteed_part: float = 0.0
    """Of its memory. Above 0 where the host has no room for all of both."""
    room_bytes: int = 0
    """That the ballast leaves beside the small guarantees of both; 0: room for one of the pair."""
    gpu_part: float = 1.0
    """Of the time alone; the rest is the processor's."""
    phases: int = 1


H200_BYTES = 150_000_000_000
"""That GPU's own size: on it no ballast is needed."""
JOBS = (
    Case("20 GB each", 20_000_000_000, 1.10, 60.0),
    Case("80 GB each", 80_000_000_000, 1.03, 110.0, guaranteed_part=0.5, room_bytes=H200_BYTES),
)
NVSHARE = tuple(
    Case(
        f"nvshare {one.name}", one.total_bytes, one.ratios["quantum 30 s"], published.SOLO_S, room_bytes=published.GPU_BYTES, gpu_part=one.gpu_part,
        phases=published.PHASES,
    )
    for one in published.PROGRAMS
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Plan:
    """What one job does."""

    steps: int
    """Of each phase."""
    pause_s: float
    phases: int

    @property
    def words(self) -> tuple[object, ...]:
        return ("phases", self.steps, self.pause_s, self.phases)


def _prepared(job: Job, total_bytes: int, form: str = "segments") -> Job:
    job.request("make", form, total_bytes)
    return job


def _alone(
    node: Node, case: Case, total_bytes: int, plan: Plan | None, solo_s: float, phases: int
) -> tuple[Plan, float]:
    """One job in a container that is guaranteed all: what it is to do, if that is not known yet, and what it takes."""
    job = _prepared(node.alone(total_bytes), total_bytes)
    if plan is None:
        seen = job.request("steps", CALIBRATION_STEPS)
        step_s = (seen["last_s"] - seen["began_s"]) / CALIBRATION_STEPS
        plan = Plan(
            max(1, round(solo_s * case.gpu_part / phases / step_s)), solo_s * (1 - case.gpu_part) / phases, phases
        )
    seen = job.request(*plan.words)
    job.end()
    return plan, seen["last_s"] - seen["began_s"]


def _together(jobs: list[Job], plan: Plan, stop_s: float = 0.0) -> tuple[float, bool]:
    """Seconds until both have ended, and whether they did. Those that have not after `stop_s` are killed."""
    began_s = time.monotonic()
    for job in jobs:
        job.send(*plan.words)
    ended_s = []
    try:
        for job in jobs:
            left_s = began_s + stop_s - time.monotonic() if stop_s else 600.0
            ended_s.append(job.receive(max(0.1, left_s))["last_s"])
    except TimeoutError:
        if not stop_s:
            raise
        for job in jobs:
            job.lines.kill()
        return stop_s, False
    return max(ended_s) - began_s, True


def _serial(session: Session, case: Case, total_bytes: int) -> tuple[Plan, float]:
    """Both one after the other: rows, the plan and the seconds of both."""
    solo_s, phases = _scale(session, case)
    plan, first_s = _alone(session.node, case, total_bytes, None, solo_s, phases)
    _, second_s = _alone(session.node, case, total_bytes, plan, solo_s, phases)
    rows = {
        "first alone": Figure(first_s, "s"),
        "second alone": Figure(second_s, "s"),
        "steps of a phase": Figure(plan.steps),
        "pause of a phase": Figure(plan.pause_s, "s"),
        "phases": Figure(plan.phases),
    }
    session.add(rows, complete=False)
    return plan, first_s + second_s


def _scale(session: Session, case: Case) -> tuple[float, int]:
    """Seconds of one job alone, and its phases."""
    return (FAKE_SOLO_S, min(case.phases, FAKE_PHASES)) if session.fake else (case.solo_s, case.phases)


def _known(session: Session, case: Case, parts: tuple[str, ...]) -> tuple[Plan, float] | None:
    """What an earlier command of the same CSV measured of the two one after the other."""
    for part in parts:
        names = ("steps of a phase", "pause of a phase", "phases", "first alone", "second alone")
        seen = [session.figures.value(part, case.name, name, 0) for name in names]
        if None not in seen:
            steps, pause_s, phases, first_s, second_s = (value for value in seen if value is not None)
            return Plan(int(steps), pause_s, int(phases)), first_s + second_s
    return None


def _need_gpu(session: Session, total_bytes: int) -> None:
    """RuntimeError on a GPU that is too small for one of the pair beside the other's guarantee."""
    has = session.node.total_bytes()
    if total_bytes * 1.5 > has:
        raise RuntimeError(f"this GPU has {has / 1e9:.0f} GB, the pair needs {total_bytes * 1.5 / 1e9:.0f}")


def _room_mib(session: Session, case: Case, total_bytes: int) -> int:
    """That the ballast leaves."""
    if not case.room_bytes:
        return session.node.room_for_one_mib(total_bytes)
    beside = 0 if case.guaranteed_part else 2 * session.node.guarantee_mib
    return session.scaled(case.room_bytes) // 2**20 + beside


def _pairs(session: Session, part: str, cases: tuple[Case, ...]) -> None:
    node = session.node
    for repeat, case in session.repeats(cases):
        total_bytes = session.scaled(case.total_bytes)
        with session.measuring(part, case.name, repeat, 4.6 * case.solo_s) as wanted:
            if not wanted:
                continue
            guarantee_mib = max(node.guarantee_mib, int(total_bytes * case.guaranteed_part) // 2**20)
            node.need_swapping()
            _need_gpu(session, total_bytes)
            plan, serial_s = _serial(session, case, total_bytes)
            with node.ballast(_room_mib(session, case, total_bytes)) as ballast_mib:
                jobs = [_prepared(node.job(total_bytes, guarantee_mib=guarantee_mib), total_bytes) for _ in range(2)]
                took_s, _ = _together(jobs, plan)
                wrong = sum(job.request("check")["wrong_bytes"] for job in jobs)
                session.add(
                    {
                        "ballast": Figure(ballast_mib, "MiB"),
                        "one after the other": Figure(serial_s, "s"),
                        "both": Figure(took_s, "s"),
                        "both of one after the other": Figure(took_s / serial_s, "", _goal(part, case)),
                        "wrong bytes": Figure(wrong),
                    }
                )
                for job in jobs:
                    job.end()


def _goal(part: str, case: Case) -> str:
    return f"published, quantum 30 s: {case.goal:.2f}" if part == "nvshare" else f"goal <= {case.goal}"


def jobs(session: Session) -> None:
    """The issue's pairs."""
    _pairs(session, "jobs", JOBS)


def nvshare(session: Session) -> None:
    """The published pairs."""
    _pairs(session, "nvshare", NVSHARE)


def uvm(session: Session) -> None:
    """All pairs in unified memory, once each. One after the other is measured by the first command, the pair itself where nine minutes are left."""
    for case in (*JOBS, *NVSHARE):
        with session.measuring("uvm", case.name, 0, 2.3 * case.solo_s) as wanted:
            if wanted:
                _uvm(session, case)


def _uvm(session: Session, case: Case) -> None:
    node, total_bytes = session.node, session.scaled(case.total_bytes)
    _need_gpu(session, total_bytes)
    part = "nvshare" if case in NVSHARE else "jobs"
    known = _known(session, case, ("uvm", part))
    plan, serial_s = known or _serial(session, case, total_bytes)
    stop_s = FAKE_UVM_STOP_S if session.fake else UVM_STOP_S
    if session.left_s < stop_s - UVM_LATE_S:
        return
    with node.ballast(_room_mib(session, case, total_bytes)) as ballast_mib:
        pair = [_prepared(node.outside(), total_bytes, "managed") for _ in range(2)]
        took_s, ended = _together(pair, plan, stop_s)
        published_ratio = {f"nvshare {one.name}": one.ratios["unified memory"] for one in published.PROGRAMS}
        note = f"published: {published_ratio[case.name]:.2f}" if case.name in published_ratio else ""
        more = "" if ended else f"> {took_s / serial_s:.2f}"
        figures = {
            "ballast": Figure(ballast_mib, "MiB"),
            "one after the other": Figure(serial_s, "s", "of an earlier command" if known else ""),
            "both": Figure(took_s, "s", "" if ended else f"> {stop_s:.0f}: stopped"),
            "both of one after the other": Figure(took_s / serial_s, "", f"{more} {note}".strip()),
        }
        session.add(figures)
        for job in pair:
            job.end()

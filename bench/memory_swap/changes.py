"""Two containers change places on a GPU that has room for one: how long from the last kernel of the one to the first kernel of the other.

places      one has been idle for a second when the other begins: from there to its first kernel. Every cell is checked in each turn
quanta      both have work all the time, and the arbiter's quanta decide
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from itertools import pairwise

from bench.memory_swap import stamps
from bench.memory_swap.figures import Figure
from bench.memory_swap.session import Session
from bench.memory_swap.swap_node import Job, Node

GOAL_S = 0.45
MODEL_BYTES = 16_000_000_000
CHANGES = 12
IDLE_S = 1.0
PLACES_S = 90.0
"""One measurement of `places`. Guessed: PyTorch starts twice, and 12 turns of two seconds."""
QUANTA_S = 60.0
FAKE_CHANGES, FAKE_QUANTA_S = 4, 6.0


@dataclass(frozen=True, slots=True)
class Form:
    """Of a pair's memory."""

    name: str
    form: str
    torch: str = ""


FORMS = (
    Form("driver, segments", "segments"),
    Form("driver, expandable", "expandable"),
    Form("PyTorch, segments", "segments", "default"),
    Form("PyTorch, expandable", "expandable", "expandable_segments:True"),
)


def _pair(node: Node, form: Form, total_bytes: int) -> tuple[list[Job], dict[str, Figure]]:
    """Two containers that have their memory, and what they have."""
    jobs, figures = [], {}
    for name in ("first", "second"):
        job = node.job(total_bytes, torch=form.torch)
        made = job.request("make", form.form, total_bytes)
        jobs.append(job)
        figures |= {
            f"bytes of the {name}": Figure(made["bytes"] / 2**30, "GiB"),
            f"elastic, {name}": Figure(100 * made["elastic"] / made["bytes"], "%"),
        }
    return jobs, figures


def places(session: Session) -> None:
    """One measurement for each form and repeat."""
    node, total_bytes = session.node, session.scaled(MODEL_BYTES)
    for repeat, form in session.repeats(FORMS):
        if form.torch and session.fake:
            continue
        with session.measuring("places", form.name, repeat, PLACES_S) as wanted:
            if not wanted:
                continue
            node.need_swapping()
            with node.ballast(node.room_for_one_mib(total_bytes)) as ballast_mib:
                jobs, figures = _pair(node, form, total_bytes)
                figures["ballast"] = Figure(ballast_mib, "MiB")
                swaps = node.swaps()
                figures |= _change_places(jobs, FAKE_CHANGES if session.fake else CHANGES)
                figures["swaps"] = Figure(node.swaps() - swaps)
                if figures["swaps"].value < figures["changes"].value:
                    raise RuntimeError(f"{figures['swaps'].value} swaps: the GPU was not short of memory")
                session.add(figures)
                for job in jobs:
                    job.end()


def _change_places(jobs: list[Job], count: int) -> dict[str, Figure]:
    """The second has just made its memory, so the first is away. Each has been idle for a while when the other begins: a container that ended its work a
    moment ago keeps its place for as long as a change takes."""
    jobs[1].request("steps", 1)
    gaps, steps, wrong = [], [], 0
    for number in range(count):
        job = jobs[number % 2]
        time.sleep(IDLE_S)
        seen = job.request("steps", 1)
        gaps.append(seen["first_s"] - seen["began_s"])
        wrong += job.request("check")["wrong_bytes"]
        seen = job.request("steps", 1)
        steps.append(seen["last_s"] - seen["began_s"])
    return {
        "first change": Figure(gaps[0], "s", f"goal <= {GOAL_S}"),
        "second change": Figure(gaps[1], "s"),
        "steady change": Figure(statistics.median(gaps[2:]), "s", f"goal <= {GOAL_S}"),
        "longest steady change": Figure(max(gaps[2:]), "s"),
        "a step in place": Figure(statistics.median(steps), "s"),
        "changes": Figure(count),
        "wrong bytes": Figure(wrong),
    }


def quanta(session: Session) -> None:
    """Both work all the time."""
    node, total_bytes = session.node, session.scaled(MODEL_BYTES)
    seconds = FAKE_QUANTA_S if session.fake else QUANTA_S
    for repeat in range(session.repeat):
        with session.measuring("quanta", FORMS[0].name, repeat, QUANTA_S + 40) as wanted:
            if not wanted:
                continue
            node.need_swapping()
            with node.ballast(node.room_for_one_mib(total_bytes)):
                jobs, figures = _pair(node, FORMS[0], total_bytes)
                for job in jobs:
                    job.send("steps", 0, seconds)
                answers = [job.receive() for job in jobs]
                seen = [
                    [one for one in stamps.read(job.stamps) if one.began_s >= answer["began_s"]]
                    for job, answer in zip(jobs, answers, strict=True)
                ]
                wrong = sum(job.request("check")["wrong_bytes"] for job in jobs)
                session.add(figures | _quanta(stamps.changes(*seen)) | {"wrong bytes": Figure(wrong)})
                for job in jobs:
                    job.end()


def _quanta(seen: list[stamps.Change]) -> dict[str, Figure]:
    """Changes, how long they take and how far apart they are."""
    if len(seen) < 2:
        return {"changes": Figure(len(seen))}
    apart = [later.at_s - earlier.at_s for earlier, later in pairwise(seen)]
    return {
        "changes": Figure(len(seen)),
        "change": Figure(
            statistics.median(one.gap_s for one in seen), "s", f"too long by {seen[0].piece_s:.3f} s at most"
        ),
        "longest change": Figure(max(one.gap_s for one in seen), "s"),
        "between changes": Figure(statistics.median(apart), "s"),
    }

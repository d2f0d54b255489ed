"""A plugin killed between any two changes of a file, pods deleted by force, a kubelet without its checkpoint, a reboot: nothing granted is
lost, no GPU is given twice, no pod is refused for it later, nothing stays for ever.

The kill is simulated: from the chosen change on, every change of a file raises, also in `except` and `finally`.
"""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from pathlib import Path
from typing import Any, Final

import pytest
from hypothesis import event, example, given, settings
from hypothesis import strategies as st

from deviceplugin.upkeep import ENDED_AGE_S, GARBAGE_AGE_S
from tests.examples import examples
from tests.unit.deviceplugin.simulated import SimulatedNode

kill_after = st.none() | st.integers(0, 30)
numbers = st.integers(0, 5)
admit = st.tuples(
    st.just("admit"), st.integers(0, 1), st.sampled_from([1, 2, 4]), st.sampled_from([0, 0, 2, 4]), st.sampled_from([0, 50]),
    kill_after,
)  # fmt: skip
steps = st.lists(
    st.one_of(
        admit,
        admit,
        st.tuples(st.just("start"), numbers, kill_after),
        st.tuples(st.just("start again"), numbers, kill_after),
        st.tuples(st.just("remove"), numbers),
        st.tuples(st.just("remove by force"), numbers),
        st.tuples(st.just("end"), numbers),
        st.tuples(st.just("lose checkpoint")),
        st.tuples(st.just("reboot")),
        st.tuples(st.just("look")),
        st.tuples(st.just("look after"), st.sampled_from([0.0, 2 * ENDED_AGE_S, 2 * GARBAGE_AGE_S]), kill_after),
        st.tuples(st.just("restart"), kill_after),
        st.tuples(st.just("upgrade"), st.integers(1, 3), kill_after),
    ),
    max_size=16,
)  # fmt: skip


async def live_through(machine: SimulatedNode, done: list[tuple[Any, ...]]) -> None:
    for step in done:
        match step:
            case ("restart", changes):
                machine.plugin = None
                await machine.working(changes)
            case ("upgrade", version, changes):
                machine.image.write_bytes(b"library %d" % version)
                machine.plugin = None
                await machine.working(changes)
            case (name, *arguments):
                await getattr(machine, name.replace(" ", "_"))(*arguments)
        machine.check()
    await machine.check_end(2 * GARBAGE_AGE_S)


def run(done: list[tuple[Any, ...]]) -> SimulatedNode:
    folder = Path(tempfile.mkdtemp(prefix="crash-"))
    try:
        machine = SimulatedNode(folder)
        asyncio.run(live_through(machine, done))
        return machine
    finally:
        shutil.rmtree(folder)


@pytest.fixture(autouse=True)
def _arbiter_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deviceplugin.admission.listens", lambda path: path.parent.is_dir())


BEFORE = [
    ("admit", 0, 4, 0, 0, None), ("start", 0, None), ("admit", 1, 1, 2, 0, None), ("start", 1, None),
]  # fmt: skip
"""A container that runs; and an init container that runs, whose app container waits for half of its devices."""

LATER: Final = ("look after", 2 * GARBAGE_AGE_S, None)


@settings(deadline=None, max_examples=examples(80))
@example([("restart", None), LATER])
@example([("restart", None), LATER, ("start", 1, None), ("restart", None), LATER])
@example([("start", 1, 3), ("restart", None), LATER, ("start", 1, None), LATER])
@example([("remove by force", 0), ("admit", 0, 4, 0, 0, None), ("start", 1, None), LATER])
@example([("remove by force", 0), ("restart", None), LATER, ("look",), ("admit", 0, 4, 0, 0, None)])
@example([("lose checkpoint",), ("restart", None), ("admit", 0, 4, 0, 0, None), ("start", 0, None), LATER])
@example([("reboot",), ("start", 0, None), ("start", 1, None)])
@given(steps)
def test_whatever_happens_nothing_granted_is_lost_no_gpu_is_given_twice_and_nothing_stays_for_ever(
    done: list[tuple[Any, ...]],
) -> None:
    machine = run([*BEFORE, *done])
    event(f"kills: {machine.kills}")
    event(f"refusals: {machine.refusals}")
    event(f"deleted by force while it ran: {machine.given_up}")


def test_a_container_that_crashes_keeps_its_own_grant_though_another_has_its_devices() -> None:
    setup_and_main = ("admit", 0, 4, 4, 50, None)
    run(
        [
            setup_and_main,
            ("start", 0, None),
            *[("start again", 0, None)] * 3,
            ("start", 0, None),
            ("start again", 0, None),
        ]
    )


def test_the_capacity_of_a_pod_deleted_by_force_is_refused_only_while_its_processes_run() -> None:
    full = ("admit", 0, 12, 0, 0, None)
    fill = [full, ("start", 2, None), ("remove by force", 2)]
    machine = run([*BEFORE, *fill, full])  # the extender has not heard of the orphan: the race
    assert machine.refusals == 1
    machine = run([*BEFORE, *fill, ("look",), full])
    assert machine.refusals == 0  # it was placed nowhere
    assert machine.count == 3
    machine = run([*BEFORE, *fill, ("look",), ("end", 0), ("look",), full])
    assert (machine.refusals, machine.count) == (0, 4)


@pytest.mark.parametrize(
    "step",
    [
        lambda n: [("admit", 0, 2, 0, 0, n)],
        lambda n: [("admit", 0, 2, 4, 0, n)],
        lambda n: [("remove", 0), ("admit", 0, 4, 0, 0, n)],
        lambda n: [("admit", 0, 2, 0, 0, None), ("start", 2, n)],
        lambda n: [("start", 1, n)],
        lambda n: [("upgrade", 1, n), ("start", 0, None)],
        lambda n: [("upgrade", 1, None), ("remove", 0), ("admit", 0, 4, 0, 0, n)],
        lambda n: [("remove", 0), ("look after", 2 * GARBAGE_AGE_S, n)],
        lambda n: [("reboot",), ("restart", n), ("start", 0, None), ("start", 1, None)],
        lambda n: [("remove by force", 0), ("restart", n)],
    ],
    ids=[
        "allocate", "allocate for an init container", "allocate again", "start", "start after init", "upgrade", "allocate anew",
        "collect", "start after a reboot", "restart beside an orphan",
    ],
)  # fmt: skip
def test_a_kill_at_each_single_change(step: Any) -> None:
    changes = 0
    while run([*BEFORE, *step(changes)]).kills:
        changes += 1
        assert changes < 160
    assert changes > 2  # the step does change files, and each of them was the last one once

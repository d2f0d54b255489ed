"""Filter, bind, a lagging watch, lost replies and restarts in any order: no GPU is assigned twice, and nothing leaks.

First the machine alone (`racing`), then with others: pods for which nothing is reserved, preemption and nomination reservations, two bind
calls for one pod, and another scheduler that binds.
"""

from __future__ import annotations

import copy
from typing import Any, cast

import msgspec
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import invariant, precondition, rule, run_state_machine_as_test

from extender.bind import BindOrder
from extender.preemption.victim_candidates import VictimCandidates
from extender.protocol import BindingArgs, PreemptionArgs
from extender.state import State
from extender.watch_intake import WatchIntake
from kube.objects import Pod
from tests.builders import pod
from tests.examples import examples
from tests.unit.extender.extender_parts import answer_of, step_by_step
from tests.unit.extender.racing import NODES, Races
from vgpu.api.codec import assignment_to_json
from vgpu.api.names import DEFAULT
from vgpu.scheduling.placement import Placement

NAMES = st.sampled_from(sorted(NODES))
TURNED_DOWN = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable"}


class Crowded(Races):
    """The machine, with other actors."""

    @rule(gib=st.sampled_from([4, 8, 16]), priority=st.sampled_from([0, 1000]), listed=st.booleans())
    def create_other(self, gib: int, priority: int, listed: bool) -> None:
        self.made += 1
        built = pod(f"p{self.made}").asking(mib=gib * 1024).of_priority(priority)
        self.change(f"p{self.made}", (built.annotated(placement="scheduler") if listed else built).plain())

    @precondition(lambda self: self.truth and len(self.flying) < 4)
    @rule(data=st.data(), where=NAMES)
    def bind_whatever_was_decided(self, data: st.DataObject, where: str) -> None:
        """As by a scheduler after a restart: also beside a call that is under way."""
        self.bind_to(self.some(data, self.truth), where)

    def bind_to(self, name: str, where: str) -> str:
        """The call that is under way, if it is."""
        self.made += 1
        call = f"{name} {self.made}"
        self.go(call, self.binder.bind(BindingArgs(name, "default", f"uid-default-{name}", where)))
        return call

    @precondition(lambda self: self.truth)
    @rule(data=st.data(), where=NAMES)
    def bound_by_another(self, data: st.DataObject, where: str) -> None:
        """By another extender, which respects this one's reservations; and the watch reports it at once."""
        self.let_another_bind(self.some(data, self.truth), where)

    def let_another_bind(self, name: str, where: str) -> None:
        """Where it fits there, by the truth and by the extender's reservations."""
        thing = copy.deepcopy(self.truth[name])
        if thing["spec"].get("nodeName"):
            return
        other = State(lambda: self.now_s, names=DEFAULT)
        WatchIntake(other).node_changed(None, self.nodes[where].build())
        for one in self.truth.values():
            WatchIntake(other).pod_changed(None, msgspec.convert(one, Pod))
        for uid, allocation in self.state.allocations:
            if other.allocations.get(uid) is None and uid != thing["metadata"]["uid"]:
                other.allocations.allocate(uid, allocation)
        one = msgspec.convert(thing, Pod)
        request = other.request_of(one)
        found = other.place(request, [where])
        if isinstance(found, Placement):
            other.allocate(one.uid, one.key, request, found)
            if BindOrder(other, 0).blocked(one.uid):
                return
            thing["spec"]["nodeName"] = where
            thing["metadata"]["annotations"][DEFAULT.assignment] = assignment_to_json(found.assignment)
            self.change(name, thing)
            self.deliver_all()

    @rule(gib=st.sampled_from([8, 16]), where=NAMES, other=NAMES, twice=st.booleans())
    def overtake(self, gib: int, where: str, other: str, twice: bool) -> None:
        """A pod is bound by another while we read it, or by another call of ours: in one step, for it is rare."""
        self.create_other(gib, 0, True)
        name = f"p{self.made}"
        self.deliver_all()
        first, second = self.bind_to(name, where), self.bind_to(name, other) if twice else ""
        if not twice:
            self.let_another_bind(name, other)
        for call in (first, second, first, second):
            if call in self.flying:
                self.answer_one(call, "overtaken")

    def waiting(self) -> list[str]:
        """Pods that the extender has seen, and that are not placed."""
        return [
            name
            for name, one in self.view.items()
            if name in self.truth and not one.spec.node_name and self.state.allocations.place_of(one.uid) is None
        ]

    @precondition(lambda self: self.waiting())
    @rule(data=st.data())
    def plan_ahead(self, data: st.DataObject) -> None:
        self.plan_for(self.some(data, self.waiting()))

    def plan_for(self, name: str) -> None:
        """A nomination reservation, if the pod fits."""
        one = self.view[name]
        request = self.state.request_of(one)
        found = self.state.place(request, sorted(NODES))
        if isinstance(found, Placement) and self.preemption.reservations.get(one.uid) is None:
            self.nominator.reservations.put(one.uid, one.key, one.spec.priority or 0, request, found)

    @precondition(lambda self: self.waiting())
    @rule(data=st.data(), where=NAMES, reported=st.booleans(), at=st.integers(1, 6))
    def preempt(self, data: st.DataObject, where: str, reported: bool, at: int) -> None:
        """As kube-scheduler does: it evicts the pods that the answer names, then nominates the preemptor."""
        self.preempt_for(self.some(data, self.waiting()), where, reported, at)

    @rule(where=NAMES, reported=st.booleans(), at=st.integers(1, 6))
    def preempt_over_plans(self, where: str, reported: bool, at: int) -> None:
        """With pods of low priority bound there and planned there: in one step, for it is rare."""
        for gib, priority in ((8, 0), (8, 0), (16, 1000)):
            self.create_other(gib, priority, False)
        self.deliver_all()
        bound, planned, urgent = (f"p{self.made - back}" for back in (2, 1, 0))
        self.let_another_bind(bound, where)
        self.plan_for(planned)
        if urgent in self.waiting():
            self.preempt_for(urgent, where, reported, at)

    def preempt_for(self, name: str, where: str, reported: bool, at: int) -> None:
        """When the search yields for the `at`-th time, all that is on its way arrives, and another pod is placed."""

        def meanwhile(step: int) -> None:
            if step == at:
                self.deliver_all()
                self.create_other(4, 0, listed=False)
                self.filter_one(f"p{self.made}", [where])

        body = {"Pod": self.truth[name], "NodeNameToMetaVictims": {where: {"Pods": []}}}
        args = msgspec.json.decode(msgspec.json.encode(body), type=PreemptionArgs)
        with step_by_step():
            answer = answer_of(self.preemption.verb.preempt(args, self.preemption.verb.deadline()), meanwhile)
        for node, victims in answer.nodes.items():
            for uid in (one.uid.removeprefix("uid-default-") for one in victims.pods or ()):
                if uid in self.truth:
                    thing = copy.deepcopy(self.truth[uid])
                    thing["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
                    self.change(uid, thing)
            self.room_comes_free_for(f"uid-default-{name}", {one.uid for one in victims.pods or ()})
            if reported:
                status = {"phase": "Pending", "nominatedNodeName": node, "conditions": [TURNED_DOWN]}
                self.change(name, self.truth[name] | {"status": status})

    @invariant()
    def what_is_kept_of_a_node_is_what_there_is(self) -> None:
        candidates = self.preemption._candidates
        anew = VictimCandidates(
            self.state,
            self.preemption._history,
            cast("Any", self.pods),
            self.preemption.disruptions,
        )
        for name in NODES:
            kept, made = candidates.view(name), anew.view(name)
            assert (kept and kept.pods) == (made and made.pods)
            assert kept is candidates.view(name), "and it is kept"

    def room_comes_free_for(self, uid: str, victims: set[str]) -> None:
        """A pod's reservation and the allocations of its victims and of other terminating pods add up to its assignment."""
        reservation, kept = self.preemption.reservations.get(uid), self.state.allocations.get(uid)
        assert reservation is not None
        assert reservation.assignment is not None
        leaving = {one.uid for one in self.view.values() if one.metadata.deletion_timestamp}
        allocations = [kept, *map(self.state.allocations.get, victims | leaving)]
        for assigned in reservation.assignment.held():
            there = (
                one for allocation in allocations if allocation is not None for one in allocation.assignment.held()
            )
            assert sum(one.mib for one in there if one.uuid == assigned.uuid) >= assigned.mib

    def teardown(self) -> None:
        super().teardown()
        if hasattr(self, "truth"):
            assert (
                len(self.preemption.reservations)
                == len(self.nominator.reservations)
                == self.preemption.verb.remembered
                == 0
            )


@pytest.mark.timeout(600)  # 400 examples of 30 steps
@pytest.mark.parametrize("machine", [Races, Crowded])
def test_no_order_of_events_assigns_a_gpu_twice_or_leaks(machine: type[Races]) -> None:
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=examples(400),
            stateful_step_count=30,
            deadline=None,
            suppress_health_check=[HealthCheck.too_slow],
            derandomize=True,
        ),
    )


class First:
    """Draws the first of what could be drawn."""

    def draw(self, strategy: Any) -> str:
        return str(strategy.elements[0])


def test_a_pod_that_was_bound_unseen_and_deleted_keeps_its_place_until_the_watch_has_reported_both() -> None:
    """Found by the machine above."""
    machine, first = Races(), cast("st.DataObject", First())
    machine.begin()
    machine.create_and_schedule(8, ["n1"], "binpack")
    machine.deliver(1)
    machine.answer(first, "reply lost")
    machine.create_and_schedule(8, ["n1"], "binpack")
    machine.delete(first)
    machine.answer(first, "done")
    machine.create_and_schedule(8, ["n1"], "binpack")
    machine.deliver(1)
    machine.no_gpu_has_more_than_it_has()
    machine.deliver_all()
    machine.free_capacity_is_what_a_count_anew_gives()

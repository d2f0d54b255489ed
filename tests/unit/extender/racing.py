"""A machine of filter, bind, a lagging watch, lost replies and restarts in any order.

It plays the API server (the truth), the watch (events in order, late) and the network (each call of the real `Binder` waits
until the machine decides how it ends). After every step the extender's records are compared with a count from scratch, and the truth
with what the GPUs have.
"""

from __future__ import annotations

import copy
from collections import Counter, deque
from collections.abc import Coroutine, Generator
from typing import Any, cast

import msgspec
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from extender.bind import Binder
from extender.compact import small_pod_of
from extender.nominate.nominator import Nominator
from extender.preemption.coordinator import PreemptionCoordinator
from extender.protocol import BindingArgs, FilterArgs
from extender.settings import Settings
from extender.state import State
from extender.watch_intake import WatchIntake
from kube.client import Client
from kube.errors import ApiError
from kube.objects import Pod
from tests.builders import NodeBuilder, gpu, node, pod
from tests.unit.extender.extender_parts import PodCache
from vgpu.api.codec import assignment_from_json
from vgpu.api.errors import TangramError
from vgpu.api.names import DEFAULT
from vgpu.scheduling.reservations import STAGES, WatchProgress

GPU_MIB = 16_384
NODES = {
    "n1": node("n1").with_inventory(gpu(0, GPU_MIB), gpu(1, GPU_MIB)).with_access("cdi"),
    "n2": node("n2").with_inventory(gpu(0, GPU_MIB, "n2")),
}
POLICIES = st.sampled_from(["binpack", "spread"])
SHRINK = small_pod_of(DEFAULT)
CHOSEN = Settings(_cli_parse_args=False)  # type: ignore[call-arg]  # settings of the base class


class ApiCall:
    """A call to the API that waits for the machine."""

    def __init__(self, verb: str, key: str, body: Any = None) -> None:
        self.verb, self.key, self.body = verb, key, body
        self.then: dict[str, Any] | None = None
        """The pod when it was sent."""

    def __await__(self) -> Generator[ApiCall, bytes, bytes]:
        return (yield self)


class Network(Client):
    """Every call becomes an `ApiCall`."""

    def __init__(self) -> None:
        pass

    async def get(self, path: str, *_: Any, **__: Any) -> bytes:
        return await ApiCall("GET", path.split("/")[6])

    async def send(self, method: str, path: str, body: object = None, **_: Any) -> bytes:
        return await ApiCall(method, path.split("/")[6], body)


class Races(RuleBasedStateMachine):
    @initialize()
    def begin(self) -> None:
        self.now_s = 0.0
        self.truth: dict[str, dict[str, Any]] = {}
        self.events: deque[tuple[float, str, dict[str, Any] | None]] = deque()
        self.flying: dict[str, tuple[Coroutine[Any, Any, str], ApiCall, float]] = {}
        self.late: list[tuple[float, ApiCall]] = []
        self.decided: dict[str, str] = {}
        self.made = 0
        self.nodes = dict(NODES)
        self.restart_now()

    def restart_now(self) -> None:
        self.listed_s = self.now_s
        self.state = State(lambda: self.now_s, names=DEFAULT, shown=self.shown)
        self.pods = PodCache()
        self.nominator = Nominator(
            Network(), self.state, pods=cast("Any", self.pods), nodes=cast("Any", {}), clock=lambda: self.now_s,
            scheduler="tangram-scheduler", when="always",
        )  # fmt: skip
        self.preemption = PreemptionCoordinator(
            Network(),
            self.state,
            WatchIntake(self.state),
            cast("Any", self.pods),
            CHOSEN,
            self.nominator,
            clock=lambda: self.now_s,
        )
        self.preemption.verb.informed.set()
        self.binder = Binder(self.state, Network(), timeout_s=1, lifted=self.preemption.lifted)
        self.view: dict[str, Pod] = {}
        self.events.clear()
        for built in self.nodes.values():
            WatchIntake(self.state).node_changed(None, built.build())
        for name in self.truth:
            self.report(name, self.truth[name])

    def shown(self) -> WatchProgress:
        return WatchProgress(
            self.now_s,
            self.listed_s,
            lambda key, uid: any((one.key, one.uid) == (key, uid) for one in self.view.values()),
        )

    def report(self, name: str, thing: dict[str, Any] | None) -> None:
        new = SHRINK(msgspec.convert(thing, Pod)) if thing is not None else None
        old = self.view.pop(name, None)
        if new is not None:
            self.view[name] = new
        self.pods.by_key = {one.key: one for one in self.view.values()}
        self.preemption.pod_changed(old, new)

    def change(self, name: str, thing: dict[str, Any] | None) -> None:
        if thing is None:
            del self.truth[name]
        else:
            self.truth[name] = thing
        self.events.append((self.now_s, name, copy.deepcopy(thing)))

    def some(self, data: st.DataObject, names: Any) -> str:
        return data.draw(st.sampled_from(sorted(names)))

    # --- users and kubelets ---

    @rule(gib=st.sampled_from([4, 8, 8, 16]), core=st.sampled_from([0, 60]), policy=POLICIES)
    def create(self, gib: int, core: int, policy: str) -> None:
        self.made += 1
        name = f"p{self.made}"
        self.change(name, pod(name).asking(mib=gib * 1024, core=core).annotated(placement=policy).plain())

    @precondition(lambda self: self.truth)
    @rule(data=st.data())
    def delete(self, data: st.DataObject) -> None:
        self.change(self.some(data, self.truth), None)

    @precondition(lambda self: self.live())
    @rule(data=st.data(), phase=st.sampled_from(["Running", "Succeeded"]))
    def go_on(self, data: st.DataObject, phase: str) -> None:
        """A pod that has finished stays so: the API server accepts no later phase."""
        name = self.some(data, self.live())
        thing = copy.deepcopy(self.truth[name])
        thing["status"] = {"phase": phase, "startTime": "2026-01-01T00:00:00Z"}
        self.change(name, thing)

    # --- the scheduler ---

    @precondition(lambda self: self.truth)
    @rule(data=st.data(), names=st.sampled_from([["n1"], ["n2"], ["n1", "n2"]]))
    def filter(self, data: st.DataObject, names: list[str]) -> None:
        self.filter_one(self.some(data, self.truth), names)

    def filter_one(self, name: str, names: list[str]) -> None:
        result = self.preemption.filter(FilterArgs(msgspec.convert(self.truth[name], Pod), tuple(names)))
        assert not result.error
        assert set(result.node_names) <= set(names)
        if result.node_names:
            self.decided[name] = result.node_names[-1]

    @rule(gib=st.sampled_from([8, 16]), names=st.sampled_from([["n1"], ["n2"], ["n1", "n2"]]), policy=POLICIES)
    def create_and_schedule(self, gib: int, names: list[str], policy: str) -> None:
        """What happens most, in one step: the machine gets further."""
        self.create(gib, 0, policy)
        name = f"p{self.made}"
        self.filter_one(name, names)
        if name in self.decided:
            self.bind_one(name)

    @precondition(lambda self: self.truth)
    @rule(data=st.data(), names=st.sampled_from([["n1"], ["n2"], ["n1", "n2"]]))
    def schedule_again(self, data: st.DataObject, names: list[str]) -> None:
        name = self.some(data, self.truth)
        self.filter_one(name, names)
        if name in self.decided and name not in self.flying:
            self.bind_one(name)

    @precondition(lambda self: self.decided.keys() - self.flying.keys())
    @rule(data=st.data())
    def bind(self, data: st.DataObject) -> None:
        self.bind_one(self.some(data, self.decided.keys() - self.flying.keys()))

    def bind_one(self, name: str) -> None:
        args = BindingArgs(name, "default", f"uid-default-{name}", self.decided.pop(name))
        self.go(name, self.binder.bind(args))

    def go(self, name: str, coroutine: Coroutine[Any, Any, str], answer: bytes | ApiError | None = None) -> None:
        """Let a bind call run until its next call to the API."""
        try:
            call = coroutine.throw(answer) if isinstance(answer, ApiError) else coroutine.send(answer)
        except (StopIteration, TangramError):
            self.flying.pop(name, None)
        else:
            call.then = copy.deepcopy(self.truth.get(call.key))
            self.flying[name] = (coroutine, call, self.now_s)

    # --- the network ---

    @precondition(lambda self: self.flying)
    @rule(data=st.data(), how=st.sampled_from(["done", "done", "overtaken", "reply lost", "late", "never", "refused"]))
    def answer(self, data: st.DataObject, how: str) -> None:
        self.answer_one(self.some(data, self.flying), how)

    def answer_one(self, name: str, how: str) -> None:
        coroutine, call, sent_s = self.flying[name]
        if how == "refused":
            return self.go(name, coroutine, ApiError(403, "Forbidden", "no"))
        if how == "late" and call.verb == "POST":
            self.late.append((sent_s, call))
        if how == "overtaken" and call.verb == "GET" and call.then is not None and "nodeName" not in call.then["spec"]:
            return self.go(name, coroutine, msgspec.json.encode(call.then))  # by what the watch showed meanwhile
        answer = self.perform(call) if how in ("done", "overtaken", "reply lost") else b""
        lost = how not in ("done", "overtaken")
        return self.go(name, coroutine, ApiError(0, "Unreachable", "lost") if lost else answer)

    @precondition(lambda self: self.late)
    @rule()
    def late_write(self) -> None:
        sent_s, call = self.late.pop(0)
        if self.now_s - sent_s < STAGES["in doubt"].life_s:
            self.perform(call)

    def perform(self, call: ApiCall) -> bytes | ApiError:
        thing = self.truth.get(call.key)
        if thing is None:
            return ApiError(404, "NotFound", "gone")
        if call.verb == "GET":
            return msgspec.json.encode(thing)
        if thing["spec"].get("nodeName"):
            return ApiError(409, "Conflict", "already assigned")
        thing = copy.deepcopy(thing)
        thing["spec"]["nodeName"] = call.body["target"]["name"]
        thing["metadata"]["annotations"] |= call.body["metadata"]["annotations"]
        self.change(call.key, thing)
        return b""

    # --- the watch, time, and restarts ---

    @precondition(lambda self: self.events)
    @rule(count=st.integers(1, 4))
    def deliver(self, count: int) -> None:
        for _ in range(min(count, len(self.events))):
            _, name, thing = self.events.popleft()
            self.report(name, thing)

    @rule(seconds=st.sampled_from([1.0, 20.0, 59.0, 61.0, 301.0]))
    def time_passes(self, seconds: float) -> None:
        if seconds > 1:
            self.deliver_all()  # the watch lags by seconds, not by minutes
        self.now_s += seconds
        self.state.expire()
        self.preemption.expire()
        self.nominator.expire()

    def deliver_all(self) -> None:
        while self.events:
            self.deliver(4)

    @rule()
    def relist(self) -> None:
        """The watch lost its place: only the differences between then and now are reported."""
        self.events.clear()
        self.now_s += 0.001
        self.listed_s = self.now_s
        for name in sorted(self.view.keys() - self.truth.keys()):
            self.report(name, None)
        for name in sorted(self.truth):
            self.report(name, self.truth[name])

    @precondition(lambda self: not self.flying and not self.late)
    @rule()
    def restart(self) -> None:
        self.restart_now()

    @rule(name=st.sampled_from(["n1", "n2"]), how=st.sampled_from(["whole", "fewer", "broken"]))
    def inventory(self, name: str, how: str) -> None:
        before: NodeBuilder = self.nodes[name]
        after = {
            "whole": NODES[name],
            "fewer": NODES[name].with_inventory(*NODES[name].gpus[1:]),
            "broken": before.with_text("{"),
        }[how]
        self.nodes[name] = after
        WatchIntake(self.state).node_changed(before.build(), after.build())

    @rule(name=st.sampled_from(["n1", "n2"]))
    def housekeeping(self, name: str) -> None:
        assert self.state.allocations.recount(name), "the records were wrong"

    # --- what must be true ---

    def bound(self) -> list[str]:
        return [name for name, thing in self.truth.items() if thing["spec"].get("nodeName")]

    def live(self) -> dict[str, Pod]:
        pods = {name: msgspec.convert(self.truth[name], Pod) for name in self.bound()}
        return {name: one for name, one in pods.items() if not one.finished}

    @invariant()
    def no_gpu_has_more_than_it_has(self) -> None:
        mib: Counter[str] = Counter()
        percent: Counter[str] = Counter()
        for one in self.live().values():
            for assigned in assignment_from_json(one.metadata.annotation(DEFAULT.assignment) or "").held():
                mib[assigned.uuid] += assigned.mib
                percent[assigned.uuid] += assigned.core_percent
        assert all(used <= GPU_MIB for used in mib.values()), mib
        assert all(used <= 100 for used in percent.values()), percent
        assert self.state.fleet.overcommitted() == []

    @invariant()
    def pods_of_one_size_that_start_together_with_cdi_are_on_the_same_gpu(self) -> None:
        gpus: dict[tuple[str, str], set[str]] = {}
        for one in self.live().values():
            if one.spec.node_name == "n1" and not one.status.start_time:
                for resource, quantity in (one.spec.containers[0].resources.limits or {}).items():
                    uuids = assignment_from_json(one.metadata.annotation(DEFAULT.assignment) or "").uuids("main")
                    gpus.setdefault((resource, str(quantity)), set()).update(uuids)
        assert all(len(uuids) == 1 for uuids in gpus.values()), gpus

    @invariant()
    def free_capacity_is_what_a_count_anew_gives(self) -> None:
        held: dict[str, int] = {}
        seen = {one.uid for one in self.view.values() if one.spec.node_name and not one.finished}
        reservations = self.state.reservations
        reserved = set(reservations.of("scheduling"))
        assert not seen & {one.uid for one in reservations}, "a pod seen bound has no reservation"
        assert {uid for uid, allocation in self.state.allocations if allocation.own} == seen | reserved
        for uid, _ in ((uid, allocation) for uid, allocation in self.state.allocations if not allocation.own):
            first = reservations.first(uid)
            assert first is not None
            assert first.rule.kind != "scheduling", "the pod's own place counts"
        for _, allocation in self.state.allocations:
            for assigned in allocation.assignment.held():
                held[assigned.uuid] = held.get(assigned.uuid, 0) + assigned.mib
        fleet = self.state.fleet
        for name, at in fleet.column.items():
            for row, one in enumerate(fleet.inventory[name].gpus):
                assert fleet.free_mib[row, at] == GPU_MIB - held.get(one.uuid, 0)

    def teardown(self) -> None:
        if not hasattr(self, "truth"):
            return
        for name in list(self.flying):
            while name in self.flying:
                coroutine, call, _ = self.flying[name]
                answer = self.perform(call)
                self.go(name, coroutine, answer)
        self.late.clear()
        self.deliver_all()
        self.relist()  # no watch reports a pod that came and went between two lists
        self.time_passes(301.0)
        assert len(self.state.reservations) == 0, "a reservation leaked"
        assert {uid for uid, _ in self.state.allocations} == {one.uid for one in self.live().values()}

"""A node whose containers have working sets, and an arbiter that carries the swap policy's orders out, in simulated time.

Copies take as long as measured on an H200: 50 GB/s each way, both ways at once. The library of a container names blocks a step after its channels
were suspended, unless it is stopped. Containers that may run get equal parts of their GPU. Nothing here knows the policy: it obeys `SwapPolicy`,
decides only after an event or at the policy's own deadline, and checks after every decision what must always be true.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from math import inf

from vgpu.memory.swap.actions import (
    Action,
    CancelSwapOut,
    Grant,
    OverLimit,
    Refuse,
    Report,
    Stranded,
    SwapIn,
    SwapOut,
)
from vgpu.memory.swap.events import (
    Able,
    Announced,
    Decided,
    Event,
    Failed,
    GpuSeen,
    Idle,
    Joined,
    Left,
    MemoryContract,
    PoolSeen,
    Progress,
    Requested,
    Suspended,
    SwappedIn,
    SwappedOut,
    Used,
    Withdrawn,
    Working,
)
from vgpu.memory.swap.policy import SwapPolicy
from vgpu.memory.swap.settings import SwapSettings

GIB = 2**30
LC, STANDARD, BE = "latency-critical", "standard", "best-effort"
STEP_S = 0.02
SPEED = 50e9
SLOWER = 1.1
"""The measured speed of a swap includes a step of the simulation, so quanta grow a little."""


def contract(
    guarantee_gib: float,
    limit_gib: float = 0,
    service_class: str = STANDARD,
    weight: float = 1,
    gpus: str = "0",
    level: int = 2,
) -> MemoryContract:
    sizes = int(guarantee_gib * GIB), int(max(limit_gib, guarantee_gib) * GIB)
    return MemoryContract(dict.fromkeys(gpus, sizes), service_class, level, weight)


@dataclass
class Memory:
    """Of a container on one GPU, as it is."""

    resident: int = 0
    elastic: int = 0
    away: int = 0

    @property
    def used(self) -> int:
        return self.resident + self.elastic

    @property
    def present(self) -> int:
        return self.used - self.away


@dataclass
class Asked:
    """A request that is not answered yet."""

    gpu: str
    bytes: int
    elastic: bool
    at_s: float
    wait_s: float


@dataclass
class Program:
    """What a container does: it allocates `working_set_gib` of each GPU, then it is `always` busy or serves requests of (when, GPU time)."""

    contract: MemoryContract
    working_set_gib: float = 0
    always: bool = False
    requests: list[tuple[float, float]] = field(default_factory=list)
    wait_s: float = 30.0
    stopped: bool = False
    """Its library does not answer."""
    working: bool = False
    arrived: list[tuple[float, float]] = field(default_factory=list)
    latencies_s: list[float] = field(default_factory=list)
    ran_s: float = 0.0
    spans: list[tuple[float, float]] = field(default_factory=list)
    """From when to when it had work and all of its memory."""
    memory: dict[str, Memory] = field(default_factory=dict)
    order: SwapOut | SwapIn | None = None
    suspended: bool = False
    cancelled: bool = False
    asked: dict[str, Asked] = field(default_factory=dict)
    refused: list[str] = field(default_factory=list)


def poisson(seed: int, rate: float, work_s: float, until_s: float, from_s: float = 2.0) -> list[tuple[float, float]]:
    """Requests of (when, GPU time)."""
    random_, at_s, made = random.Random(seed), from_s, []
    while (at_s := at_s + random_.expovariate(rate)) < until_s:
        made.append((at_s, work_s))
    return made


class SimulatedNode:
    """Runs programs under the swap policy until a given time."""

    def __init__(
        self,
        programs: dict[str, Program],
        capacity_gib: float = 24,
        pool_gib: float = 512,
        settings: SwapSettings | None = None,
        gpus: str = "0",
    ) -> None:
        self.policy, self.programs = SwapPolicy(settings), programs
        self.settings = settings or SwapSettings()
        self.capacity = {gpu: int(capacity_gib * GIB) for gpu in gpus}
        self.pool, self.ready = {gpu: int(pool_gib * GIB) for gpu in gpus}, True
        self.now_s, self.trace, self.log = 0.0, list[Event | Decided](), list[tuple[float, Action]]()
        self.moved = 0
        self.copying = True
        """Whether the copier copies."""
        self.guarantees_wait_most_s = inf
        """How long a request within a guarantee may wait at most."""
        self._ids = 0
        self._fresh = False
        for gpu in gpus:
            self.report(GpuSeen(0.0, gpu, self.capacity[gpu]))
        self.report_pool()
        for name in programs:
            self.join(name)

    def join(self, name: str) -> None:
        """The container starts, and requests its working set."""
        program = self.programs[name]
        program.memory = {gpu: Memory() for gpu in program.contract.gpus}
        self.report(Joined(self.now_s, name, program.contract))
        self.report(Able(self.now_s, name))
        for gpu in program.contract.gpus if program.working_set_gib else ():
            self.request(name, gpu, int(program.working_set_gib * GIB), wait_s=program.wait_s)
        if program.always and not program.asked:
            self.work(name)

    def leave(self, name: str) -> None:
        del self.programs[name]
        self.report(Left(self.now_s, name))

    def report(self, event: Event) -> None:
        self.trace.append(event)
        self.policy.apply(event)
        self._fresh = False

    def report_pool(self) -> None:
        for gpu, slots in self.pool.items():
            away = sum(one.memory[gpu].away for one in self.programs.values() if gpu in one.memory)
            self.report(PoolSeen(self.now_s, gpu, slots - away, self.ready))

    def request(self, name: str, gpu: str, bytes_: int, elastic: bool = True, wait_s: float = 30.0) -> str:
        self._ids += 1
        id_ = f"r{self._ids}"
        self.programs[name].asked[id_] = Asked(gpu, bytes_, elastic, self.now_s, wait_s)
        self.report(Requested(self.now_s, name, id_, gpu, bytes_, elastic, wait_s))
        return id_

    def announce(self, name: str, in_s: float) -> None:
        self.report(Announced(self.now_s, name, in_s))

    def fail(self, name: str) -> None:
        """The copier cannot carry the present order out."""
        program = self.programs[name]
        if program.order is not None:
            program.order = None
            self.report(Failed(self.now_s, name, min(program.memory), "a copy failed"))

    def set_ready(self, ready: bool) -> None:
        self.ready = ready
        self.report_pool()

    def withdraw(self, name: str, id_: str) -> None:
        del self.programs[name].asked[id_]
        self.report(Withdrawn(self.now_s, id_))

    def free(self, name: str, gpu: str, bytes_: int) -> None:
        """It frees elastic memory that is on the GPU."""
        one = self.programs[name].memory[gpu]
        one.elastic -= min(bytes_, one.elastic - one.away)
        self._report_used(name, gpu)

    def work(self, name: str) -> None:
        self.programs[name].working = True
        self.report(Working(self.now_s, name))

    def idle(self, name: str) -> None:
        self.programs[name].working = False
        self.report(Idle(self.now_s, name))

    def run(self, until_s: float) -> None:
        while self.now_s < until_s:
            self.step()

    def run_for(self, seconds: float) -> None:
        self.run(self.now_s + seconds - STEP_S / 2)

    def step(self) -> None:
        """What comes, what is decided, and then time passes."""
        self._arrive()
        self._decide_if_due()
        self._copy_out()
        self._copy_in()
        self._decide_if_due()
        self._compute()
        self.now_s += STEP_S

    def times_of(self, kind: type[Action], name: str) -> list[float]:
        return [at for at, one in self.log if isinstance(one, kind) and getattr(one, "name", "") == name]

    def may_run(self, name: str) -> bool:
        return name not in self.policy.paused()

    def _arrive(self) -> None:
        for name, program in self.programs.items():
            while program.requests and program.requests[0][0] <= self.now_s:
                program.arrived.append(program.requests.pop(0))
                if not program.working:
                    self.work(name)

    def _decide_if_due(self) -> None:
        for _ in range(100):
            deadline_s = self.policy.deadline_s()
            if self._fresh and (deadline_s is None or deadline_s > self.now_s):
                return
            self.trace.append(Decided(self.now_s))
            actions, self._fresh = self.policy.decide(self.now_s), True
            for action in actions:
                self._obey(action)
            self._check()
        raise AssertionError(f"no end of decisions at {self.now_s} s")

    def _obey(self, action: Action) -> None:
        self.log.append((self.now_s, action))
        match action:
            case Grant(id=id_) | Refuse(id=id_):
                self._answer(id_, isinstance(action, Grant))
            case SwapOut(name=name, gpus=gpus):
                program = self.programs[name]
                assert not isinstance(program.order, SwapOut), f"{name} is already swapped out"
                for gpu, bytes_ in gpus.items():
                    guarantee = program.contract.gpus[gpu][0]
                    assert 0 < bytes_ <= program.memory[gpu].present - guarantee, "only excess moves"
                    assert bytes_ <= program.memory[gpu].elastic - program.memory[gpu].away, "resident memory moves"
                program.order, program.suspended, program.cancelled = SwapOut(name, dict(gpus)), False, False
            case SwapIn(name=name):
                assert self.programs[name].order is None
                self.programs[name].order = action
            case CancelSwapOut(name=name):
                assert isinstance(self.programs[name].order, SwapOut)
                self.programs[name].cancelled = True
            case OverLimit() | Stranded() | Report():
                pass

    def _answer(self, id_: str, granted: bool) -> None:
        name, program = next((name, one) for name, one in self.programs.items() if id_ in one.asked)
        asked = program.asked.pop(id_)
        if program.always and not program.asked:
            self.work(name)
        gpu, bytes_, one = asked.gpu, asked.bytes, program.memory[asked.gpu]
        guarantee, limit = program.contract.gpus[gpu]
        if not granted:
            before = sum(one.bytes for one in program.asked.values() if one.gpu == gpu and one.at_s <= asked.at_s)
            assert one.used + before + bytes_ > guarantee, f"{name} was refused memory within its guarantee"
            program.refused.append(id_)
            return
        assert one.used + bytes_ <= limit, f"{name} is above its limit"
        if asked.elastic:
            one.elastic += bytes_
        else:
            one.resident += bytes_
        if one.used > guarantee:
            excess = sum(max(0, p.memory[gpu].used - p.contract.gpus[gpu][0]) for p in self.programs.values() if gpu in p.memory)  # fmt: skip
            assert excess <= self.pool[gpu], "excess without room in the host pool"

    def _report_used(self, name: str, gpu: str) -> None:
        one = self.programs[name].memory[gpu]
        self.report(Used(self.now_s, name, gpu, one.resident, one.elastic, one.away))

    def _copy_out(self) -> None:
        left = dict.fromkeys(self.capacity, int(SPEED * STEP_S))
        for name, program in self.programs.items():
            order = program.order
            if not isinstance(order, SwapOut):
                continue
            if not program.suspended:
                program.suspended = True
                self.report(Suspended(self.now_s, name))
                continue
            for gpu in list(order.gpus):
                can = left[gpu] if self.copying and self.ready and not program.stopped and not program.cancelled else 0
                bytes_ = min(can, order.gpus[gpu])
                if bytes_:
                    left[gpu] -= bytes_
                    order.gpus[gpu] -= bytes_
                    program.memory[gpu].away += bytes_
                    self.moved += bytes_
                    self.report(Progress(self.now_s, name, gpu, "out", bytes_))
                if order.gpus[gpu] == 0 or program.cancelled:
                    del order.gpus[gpu]
                    if not order.gpus:
                        program.order = None
                    self.report(SwappedOut(self.now_s, name, gpu))

    def _copy_in(self) -> None:
        left = dict.fromkeys(self.capacity, int(SPEED * STEP_S))
        for name, program in self.programs.items():
            if not isinstance(program.order, SwapIn) or not self.copying or not self.ready:
                continue
            for gpu, one in program.memory.items():
                self._decide_if_due()
                if not isinstance(program.order, SwapIn):
                    break
                if bytes_ := min(left[gpu], one.away, self.policy.room_bytes(name, gpu)):
                    left[gpu] -= bytes_
                    one.away -= bytes_
                    self.moved += bytes_
                    self.report(Progress(self.now_s, name, gpu, "in", bytes_))
                    if one.away == 0:
                        self.report(SwappedIn(self.now_s, name, gpu))
            if isinstance(program.order, SwapIn) and not any(one.away for one in program.memory.values()):
                program.order = None

    def _compute(self) -> None:
        running = {
            name: one for name, one in self.programs.items() if one.working and not one.asked and self.may_run(name)
        }
        for name, program in running.items():
            crowd = max(sum(gpu in other.memory for other in running.values()) for gpu in program.memory)
            program.ran_s += STEP_S / crowd
            if program.spans and abs(program.spans[-1][1] - self.now_s) < STEP_S / 2:
                program.spans[-1] = program.spans[-1][0], self.now_s + STEP_S
            else:
                program.spans.append((self.now_s, self.now_s + STEP_S))
            if program.arrived:
                at_s, work_s = program.arrived[0]
                program.arrived[0] = at_s, work_s - STEP_S / crowd
                if work_s <= STEP_S / crowd + 1e-9:
                    program.arrived.pop(0)
                    program.latencies_s.append(self.now_s + STEP_S - at_s)
                    if not program.arrived and not program.always:
                        self.idle(name)

    def _check(self) -> None:
        paused = self.policy.paused()
        for gpu, capacity in self.capacity.items():
            present = sum(one.memory[gpu].present for one in self.programs.values() if gpu in one.memory)
            assert present <= capacity, f"{present} bytes on a GPU of {capacity}"
        for name, program in self.programs.items():
            away = any(one.away for one in program.memory.values())
            assert not away or name in paused, f"{name} is said to run with memory away"
            above = any(one.used > program.contract.gpus[gpu][0] for gpu, one in program.memory.items())
            assert above or away or program.order or name not in paused, f"{name} is paused within its guarantee"
            for asked in program.asked.values():
                within = program.memory[asked.gpu].used + asked.bytes <= program.contract.gpus[asked.gpu][0]
                due_s = asked.at_s + (self.guarantees_wait_most_s if within else asked.wait_s)
                assert self.now_s <= due_s + STEP_S, f"{asked} of {name} is not answered at {self.now_s} s"

"""Keep the node's MIG layout as one of its labels declares it: the configuration of that name in a file of mig-parted's format.

The labels are the only state: after a restart the plan is made anew, from what the driver then reports. A GPU that has to change is withdrawn first, so
that the kubelet is refused it from then on, and is changed when no instance in its way is in use. Each GPU changes whole or not at all. A configuration
that a GPU can never have changes nothing. Where it is not known who uses what, or NVIDIA's MIG manager is at work, nothing is touched.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Final

import structlog

from deviceplugin.gpus.offer import Offer
from deviceplugin.grants.atomic_file import version_of
from deviceplugin.mig.declared_gpus import MigNvml, Seen, SlotsOf, configuration, glance, see, wanted
from deviceplugin.mig.declared_pace import DONE_S, WAITING_S, Pace
from deviceplugin.mig.device_users import DeviceUsers, UsersUnknown
from deviceplugin.mig.mode_switch import ModeSwitch
from deviceplugin.pod_resources import KubeletUnreachable
from nvml.errors import NvmlError
from nvml.mig_changes import NotCarriedOut, carry_out, table_of
from vgpu.api.inventory import WITHDRAWN, Gpu, GpuCondition, Withdrawal
from vgpu.mig.config import BadMigFile
from vgpu.mig.declared import Choice, NodePlan, State, chosen, mode_words, plan_node
from vgpu.mig.plan import GpuPlan

CHECK_S: Final = 2.0
"""Between rounds, each of which is a check where something may have changed (`declared_pace`). Guessed: a round without is some 10 calls of NVML a GPU in MIG mode."""
SETTLE_S: Final = 4.0
"""Between the withdrawal of a GPU and its change: the scheduler sees the inventory, and a pod that was just assigned is known. Guessed."""
RETRY_S: Final = 60.0
"""After a step that the driver refused: until then the GPU is offered as it is. Guessed."""
BY: Final = "mig-config"
"""Who withdraws these GPUs: of `Offer.set_withdrawn`."""

Report = Callable[[State, str], None]

log = structlog.get_logger("deviceplugin.mig.declared")


class DeclaredMig:
    """Of one node. `labels`: the node's, None = not known. `slots`: where MIG on demand has instances. `probe`: look for MIG instances soon. `published`
    is called when `state` is another; `report` with a state that is worth an Event, and the reason."""

    def __init__(
        self, file: Path, nvml: MigNvml, offer: Offer, users: DeviceUsers, *, labels: Callable[[], Mapping[str, str] | None], slots: SlotsOf,
        on_demand: bool, switch: ModeSwitch, probe: Callable[[], None], published: Callable[[], None], report: Report,
        clock: Callable[[], float] = time.monotonic, now: Callable[[], float] = time.time,
    ) -> None:  # fmt: skip
        self.state: State | None = None
        """What the node's label says; None: no configuration is declared."""
        self._file, self._nvml, self._offer, self._users, self._labels = file, nvml, offer, users, labels
        self._slots, self._on_demand, self._switch, self._probe, self._report = slots, on_demand, switch, probe, report
        self._published, self._clock, self._now = published, clock, now
        self._pace = Pace(clock)
        self._choice = Choice()
        self._why = self._failing = ""
        self._withdrawn_s: dict[str, float] = {}
        """UUID -> since when, by the clock."""
        self._refused: dict[str, tuple[float, str]] = {}
        """UUID -> when a step of it is tried again, and why it was refused."""
        self._changed: set[str] = set()
        """UUIDs of GPUs that were changed, and that no probe has shown since."""
        self._changing = False
        """Is a GPU about to be changed?"""

    @property
    def label(self) -> dict[str, str | None]:
        """Of the node, by which everybody sees the state."""
        return {self._offer.names.mig_config_state: self.state}

    async def run(self) -> None:
        """Until cancelled."""
        try:
            while True:
                await self._round()
                await asyncio.sleep(CHECK_S)
        finally:
            self._switch.forget()

    async def _round(self) -> None:
        if not self._pace.due(await self._inputs()):
            return
        rest_s = 0.0
        try:
            await self.once()
            rest_s = self._rest_s()
        except (NvmlError, UsersUnknown, KubeletUnreachable) as error:
            if str(error) != self._failing:
                log.warning("the declared MIG layout is not followed now", error=str(error), retry_s=CHECK_S)
            self._failing = str(error)
            self._tell("pending", f"label {self._choice.written}: {error}")
        else:
            self._failing = ""
        finally:
            self._pace.checked(rest_s)

    async def _inputs(self) -> object:
        """Everything that a check depends on and that is cheap to read: with another of it, a check may do or say something else."""
        labels = self._labels()
        choice = None if labels is None else chosen(labels, self._offer.names)
        if choice is None or not choice.name or choice.hold or not self._offer.probed:
            return choice, self._offer.probed
        try:
            file: object = version_of(self._file)
        except OSError as error:
            file = str(error)
        uuids = [gpu.uuid for gpu in self._offer.reported.gpus]
        slots = [frozenset(self._slots(uuid)) for uuid in uuids]
        seen = await asyncio.to_thread(glance, self._nvml, uuids)
        return choice, file, self._offer.version, slots, self._users.known(), seen

    def _rest_s(self) -> float:
        """How long the next check may wait if nothing changes: not while a GPU is being changed."""
        if self._switch.going or self._changing or self._changed:
            return 0.0
        return DONE_S if self.state == "success" else WAITING_S

    async def once(self) -> None:
        """Read the labels and follow them. Raises NvmlError, UsersUnknown, KubeletUnreachable: then everything stays as it is."""
        labels, self._changing = self._labels(), False
        if labels is None or not self._offer.probed:
            return
        choice = chosen(labels, self._offer.names)
        if choice != self._choice:
            self._choice, self._refused = choice, {}
            self._switch.forget()
        if not choice.name or choice.hold:
            self._withdraw(())
            self._tell("failed" if choice.bad else "pending" if choice.hold else None, choice.bad or choice.hold)
            return
        if self._switch.going:
            await self._end_switch()
            return
        try:
            seen, plan = await self._planned(choice)
        except BadMigFile as error:
            plan, seen = NodePlan(failed=str(error)), []
        await self._follow(choice, plan, {one.gpu.uuid: one for one in seen})

    async def _planned(self, choice: Choice) -> tuple[list[Seen], NodePlan]:
        """Raises BadMigFile, NvmlError, UsersUnknown, KubeletUnreachable."""
        gpus = [gpu for gpu in self._offer.reported.gpus if self._ours(gpu)]
        out = self._out(gpus)
        users = await self._users.read()
        seen = await asyncio.to_thread(see, self._nvml, gpus, users, out)
        config = configuration(self._file, choice.name, seen)
        plan = plan_node(wanted(config, seen, self._slots, on_demand=self._on_demand), out)
        if plan.failed:
            return seen, plan
        unread = {
            one.gpu.uuid: f"GPU {one.gpu.index} ({one.gpu.uuid}): {out[one.gpu.uuid]}" for one in seen if one.unread
        }
        return seen, replace(plan, waiting={**plan.waiting, **unread})

    def _ours(self, gpu: Gpu) -> bool:
        shown = self._offer.inventory().gpu(gpu.uuid)
        return shown is None or all(one.reason != Withdrawal.NOT_SELECTED for one in shown.withdrawn)

    def _out(self, gpus: Collection[Gpu]) -> dict[str, str]:
        """GPUs that are not to be touched now, by UUID, and why."""
        self._refused = {uuid: one for uuid, one in self._refused.items() if one[0] > self._clock()}
        found = {uuid: why for uuid, (_, why) in self._refused.items()}
        for gpu in gpus:
            shown = self._offer.inventory().gpu(gpu.uuid)
            others = [one for one in shown.withdrawn if one.reason != Withdrawal.MIG_CONFIG] if shown else []
            if others:
                found[gpu.uuid] = f"it is withdrawn ({others[0]})"
            elif not gpu.healthy or (shown is not None and not shown.healthy):
                found[gpu.uuid] = "it is unhealthy"
        return found

    async def _follow(self, choice: Choice, plan: NodePlan, seen: Mapping[str, Seen]) -> None:
        for one in plan.switch:  # idle, as the plan is not refused
            self._switch.idle(one.uuid)
        self._switch.keep_only([one.uuid for one in plan.switch])
        ready = [one for one in plan.switch if self._switch.due(one.uuid)][:1]
        unseen = self._unseen(seen)
        self._changing = bool(plan.apply or ready)
        self._withdraw({one.uuid for one in (*plan.apply, *ready)} | plan.drains | unseen)
        changed = [one for one in plan.apply if self._settled(one.uuid)]
        for one in changed:
            await self._change(one)
        if not changed and ready and self._settled(ready[0].uuid):
            self._switch.begin(ready[0])
        self._tell_plan(choice, plan, unseen)

    def _tell_plan(self, choice: Choice, plan: NodePlan, unseen: Collection[str]) -> None:
        refused = "; ".join(why for _, why in self._refused.values())
        if why := plan.failed or refused:
            self._tell("failed", f"label {choice.written}: {why}" + ("; nothing was changed" if plan.failed else ""))
        elif plan.done and not unseen:
            self._tell("success", f"label {choice.written}: the MIG layout is as declared")
        else:
            stays = [mode_words(one) for one in plan.switch] if self._switch.never else []
            waits = [*plan.waiting.values(), *stays]
            self._tell("pending", f"label {choice.written}: " + ("; ".join(waits) or "the MIG layout is being changed"))

    async def _change(self, plan: GpuPlan) -> None:
        """One GPU, whole or not at all. From its withdrawal on no container was given an instance of it."""
        try:
            await asyncio.to_thread(carry_out, [plan], self._nvml, lambda uuid: table_of(self._nvml.mig(uuid)))
        except NotCarriedOut as error:
            self._refuse(plan, str(error))
            return
        self._ended(plan)

    async def _end_switch(self) -> None:
        plan, why = await self._switch.follow(self._offer.reported)
        if plan is None:
            return
        if why:
            self._refuse(plan, why)
        else:
            self._ended(plan)

    def _refuse(self, plan: GpuPlan, why: str) -> None:
        log.error("the MIG layout of a GPU is not changed", gpu=plan.uuid, error=why, retry_s=RETRY_S)
        self._refused[plan.uuid] = self._clock() + RETRY_S, f"GPU {plan.index} ({plan.uuid}): {why}"
        self._probe()

    def _ended(self, plan: GpuPlan) -> None:
        log.info(
            "the MIG layout of a GPU is changed", gpu=plan.uuid, mode=plan.mode,
            destroyed=len(plan.destroy), created=[f"{one.profile} at slice {one.start}" for one in plan.create],
        )  # fmt: skip
        self._changed.add(plan.uuid)
        self._probe()

    def _unseen(self, seen: Mapping[str, Seen]) -> set[str]:
        """GPUs that were changed, and that the inventory still shows as they were."""
        shown = {gpu.uuid: gpu for gpu in self._offer.reported.gpus}
        for uuid in list(self._changed):
            one, gpu = seen.get(uuid), shown.get(uuid)
            if one is None or gpu is None or one.shown_as(gpu, instances=not self._slots(uuid)):
                self._changed.discard(uuid)
            else:
                self._probe()
        return set(self._changed)

    def _settled(self, uuid: str) -> bool:
        return self._clock() - self._withdrawn_s.get(uuid, self._clock()) >= SETTLE_S

    def _withdraw(self, uuids: Collection[str]) -> None:
        self._withdrawn_s = {uuid: self._withdrawn_s.get(uuid, self._clock()) for uuid in uuids}
        before = self._offer.withdrawn_by(BY)
        message = f"its MIG layout is to change ({self._choice.written})"
        now = GpuCondition(Withdrawal.MIG_CONFIG, WITHDRAWN, int(self._now()), message)
        self._offer.set_withdrawn(BY, {uuid: before.get(uuid, now) for uuid in uuids})

    def _tell(self, state: State | None, why: str) -> None:
        """An Event for each state, and for each reason of a failure. That all is well after a start is none."""
        before, known = self.state, (self.state, self._why)
        self.state, self._why = state, why
        if state != before:
            self._published()
        if state is None or (state, why) == known or (state == before and state != "failed"):
            return
        if state != "success" or before is not None:
            self._report(state, why)

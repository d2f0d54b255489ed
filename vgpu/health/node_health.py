"""The health of all GPUs of a node, as it goes on. Times are seconds since 1970."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from vgpu.api.inventory import Gpu, GpuCondition
from vgpu.health.conditions import (
    GpuHealth,
    Reading,
    Reason,
    after_away,
    after_failure,
    after_reading,
    after_self_test,
    after_xid,
    since_before,
    without,
)


class NodeHealth:
    """Every method that returns a bool says whether a condition began or ended."""

    def __init__(self) -> None:
        self.readings: dict[str, Reading] = {}
        """UUID -> what the GPU showed last. Missing while it does not answer."""
        self._health: dict[str, GpuHealth] = {}
        self._earlier_s: dict[str, dict[Reason, int]] = {}
        """UUID -> since when conditions stood as this program began, until the GPU shows whether they still do."""

    def remember(self, gpus: Iterable[Gpu]) -> None:
        """As they were published before this program began. Only a failed self-test stands because of that: nothing else would find it again."""
        for gpu in gpus:
            stood = {Reason(one.reason): one for one in gpu.conditions if one.reason in set(Reason)}
            if gpu.uuid not in self.readings:  # else it has shown already what stands
                self._earlier_s[gpu.uuid] = {reason: one.since_s for reason, one in stood.items()}
            if (failed := stood.get(Reason.SELF_TEST)) is not None:
                self._health[gpu.uuid] = after_self_test(self._of(gpu.uuid), failed.message, failed.since_s)

    def remember_failed(self, uuid: str, why: str, since_s: float) -> None:
        """A GPU that was away as this program began had failed its self-test."""
        self._health[uuid] = after_self_test(self._of(uuid), why, since_s)

    def failed_test(self, uuid: str) -> str:
        """Why a GPU failed its last self-test; empty: it did not."""
        found = self._of(uuid).standing.get(Reason.SELF_TEST)
        return found.message if found is not None else ""

    @property
    def conditions(self) -> Mapping[str, tuple[GpuCondition, ...]]:
        """UUID -> what is wrong. GPUs of which nothing is are left out."""
        return {uuid: health.conditions for uuid, health in self._health.items() if health.standing}

    def stands(self, uuid: str) -> bool:
        """Is anything wrong that keeps pods off this GPU?"""
        return any(one.state != "degraded" for one in self._of(uuid).conditions)

    def xid(self, uuid: str, xid: int, at_s: float) -> bool:
        """The driver reported an XID."""
        return self._set(uuid, after_xid(self._of(uuid), xid, at_s))

    def answered(self, uuid: str, reading: Reading, at_s: float) -> bool:
        """A query was answered."""
        self.readings[uuid] = reading
        changed = self._set(uuid, after_reading(self._of(uuid), reading, at_s))
        self._earlier_s.pop(uuid, None)  # what is not there now has ended
        return changed

    def tested(self, uuid: str, why: str, at_s: float) -> bool:
        """The GPU was tried. `why` it does not work; empty: it does."""
        return self._set(uuid, after_self_test(self._of(uuid), why, at_s))

    def failed(self, uuid: str, why: str, at_s: float, *, code: int = 0, hung: bool = False) -> bool:
        """A query failed, or did not return."""
        self.readings.pop(uuid, None)
        return self._set(uuid, after_failure(self._of(uuid), why, at_s, code=code, hung=hung))

    def away(self, uuids: Collection[str], why: str, at_s: float) -> bool:
        """NVML answers nothing about any GPU."""
        self.readings.clear()
        changed = [self._set(uuid, after_away(self._of(uuid), why, at_s)) for uuid in uuids]
        return any(changed)

    def back(self) -> None:
        """NVML answers again."""
        for uuid, health in self._health.items():
            self._health[uuid] = without(health, (Reason.UNMONITORED,))

    def keep_only(self, uuids: Collection[str]) -> None:
        """Other GPUs are no longer in the machine. A failed self-test stands until they are back: only another one ends it."""
        for uuid in self._health.keys() - set(uuids):
            failed = self._health.pop(uuid).standing.get(Reason.SELF_TEST)
            if failed is not None:
                self._health[uuid] = GpuHealth({Reason.SELF_TEST: failed})
            self.readings.pop(uuid, None)

    def _of(self, uuid: str) -> GpuHealth:
        return self._health.get(uuid, GpuHealth())

    def _set(self, uuid: str, health: GpuHealth) -> bool:
        before = self._of(uuid).conditions
        if earlier_s := self._earlier_s.get(uuid):
            health = since_before(health, earlier_s)
        self._health[uuid] = health
        return before != health.conditions

"""PodGroups of Kubernetes 1.36 (scheduling.k8s.io/v1alpha2): pods that are scheduled together."""

from __future__ import annotations

from kube.objects import Condition, Metadata, Slim


class GangPolicy(Slim, frozen=True):
    """GangSchedulingPolicy."""

    min_count: int = 1


class GroupPolicy(Slim, frozen=True):
    """PodGroupSchedulingPolicy. Without `gang` the pods are scheduled one by one."""

    gang: GangPolicy | None = None


class PodGroupSpec(Slim, frozen=True):
    """What of its spec matters."""

    scheduling_policy: GroupPolicy = GroupPolicy()


class PodGroupStatus(Slim, frozen=True):
    """What of its status matters."""

    conditions: tuple[Condition, ...] = ()


class PodGroup(Slim, frozen=True):
    """A PodGroup."""

    metadata: Metadata = Metadata()
    spec: PodGroupSpec = PodGroupSpec()
    status: PodGroupStatus = PodGroupStatus()

    @property
    def key(self) -> str:
        """`namespace/name`."""
        return self.metadata.key

    @property
    def min_count(self) -> int | None:
        """Pods that are scheduled together or not at all; None where they are scheduled one by one."""
        gang = self.spec.scheduling_policy.gang
        return gang.min_count if gang is not None else None

    @property
    def scheduled(self) -> bool:
        """Did it ever fit? kube-scheduler 1.36 never withdraws that (updatePodGroupCondition)."""
        return any(one.type == "PodGroupScheduled" and one.status == "True" for one in self.status.conditions)

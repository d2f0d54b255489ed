"""What an operator sets, by environment variables or flags."""

from __future__ import annotations

from typing import Final, Literal

from pydantic import Field

from extender.preemption.history import PERIOD_S, TIMES
from observe.options import ProgramSettings, config
from vgpu.api.names import Names
from vgpu.api.overcommit import LEAST, MOST
from vgpu.api.quantity import MEMORY_UNITS_MIB
from vgpu.scheduling.reservations import STAGES

KUEUE_CONTROLLERS: Final = ",".join(
    (
        "pods", "replicationcontrollers", "replicasets.apps", "deployments.apps", "statefulsets.apps", "daemonsets.apps",
        "jobs.batch", "cronjobs.batch", "jobsets.jobset.x-k8s.io", "leaderworkersets.leaderworkerset.x-k8s.io",
        "rayclusters.ray.io", "rayjobs.ray.io", "rayservices.ray.io", "trainjobs.trainer.kubeflow.org",
        "mpijobs.kubeflow.org", "pytorchjobs.kubeflow.org", "tfjobs.kubeflow.org", "jaxjobs.kubeflow.org",
        "xgboostjobs.kubeflow.org", "paddlejobs.kubeflow.org", "appwrappers.workload.codeflare.dev",
        "sparkapplications.sparkoperator.k8s.io",
    )
)  # fmt: skip
"""Those that Kueue 0.19 supports, and the resources between them and pods."""


class Settings(ProgramSettings):
    """Tangram's scheduler extender: chooses the node and the GPU of each pod that requests a share, and binds it.

    It runs beside a kube-scheduler in one pod. That scheduler's configuration names it:

    extenders: [{urlPrefix: "http://127.0.0.1:8888", filterVerb: filter, prioritizeVerb: prioritize, weight: 2, bindVerb: bind, preemptVerb: preempt, nodeCacheCapable: true, httpTimeout: 5s, managedResources: [{name: tangram.sh/gpu-mem}, ...]}, {urlPrefix: "http://127.0.0.1:8888", prioritizeVerb: spare, weight: 5, nodeCacheCapable: true, ignorable: true, httpTimeout: 1s}]

    Every flag can be set as an environment variable, TANGRAM_EXTENDER_ and its name in capitals: TANGRAM_EXTENDER_MEMORY_UNIT=512Mi.
    """

    model_config = config("tangram-extender", "TANGRAM_EXTENDER_")

    domain: str = Field("tangram.sh", min_length=1, description="Domain of every resource and annotation name.")
    memory_unit: Literal["1Gi", "512Mi", "256Mi"] = Field(
        "1Gi", description="What one gpu-mem stands for. As the webhook and the device plugin have it."
    )
    host: str = Field(
        "127.0.0.1",
        description="Address of /filter, /bind and /preempt. Any client that reaches it can bind and evict pods.",
    )
    port: int = Field(8888, ge=0, le=65535, description="HTTP port of /filter, /bind and /preempt.")
    metrics_host: str = Field("0.0.0.0", description="Address of /healthz, /readyz and /metrics.")  # noqa: S104
    metrics_port: int = Field(8889, ge=0, le=65535, description="HTTP port of /healthz, /readyz and /metrics.")
    reservation_s: float = Field(
        STAGES["reserved"].life_s, ge=5, le=600, description="Seconds that a reservation lives between filter and bind."
    )
    bind_timeout_s: float = Field(
        4.0, ge=0.5, le=60, description="Seconds that a Binding may take. Less than the scheduler's httpTimeout."
    )
    preemption: bool = Field(
        True, description="Whether pods may be evicted for GPUs that a pod of higher priority requests."
    )
    preemption_deadline_s: float = Field(
        3.0,
        ge=0.1,
        le=55,
        description="Seconds that a search for victims may take. Then the answer is the best so far, or no pod is evicted. Less than the scheduler's httpTimeout.",
    )
    preemption_reservation_s: float = Field(
        STAGES["kept"].life_s,
        ge=10,
        le=3600,
        description="Seconds that capacity stays reserved for a pod for which other pods were evicted.",
    )
    preempted_times: int = Field(
        TIMES,
        ge=1,
        le=1000,
        description="Preemptions of one pod within preempted-period-s, after which it is not evicted.",
    )
    preempted_period_s: float = Field(
        PERIOD_S, ge=60, le=604800, description="Seconds that a preemption is remembered for preempted-times."
    )
    preempted_config_map: str = Field(
        "",
        pattern=r"^([a-z0-9.-]+/[a-z0-9.-]+)?$",
        description="ConfigMap, as namespace/name, in which preemptions are remembered over restarts. Empty: in memory only.",
    )
    kueue: bool = Field(
        False,
        description="Whether pods that belong to a Workload of Kueue are never evicted. Needs preemption, and Kueue's API.",
    )
    kueue_evict: Literal["never", "whole"] = Field(
        "never",
        description="With kueue: never evicts nothing of a Workload. whole deactivates a Workload (spec.active: false), with all its pods, where that is the extender's own least eviction; /preempt evicts nothing of it.",
    )
    kueue_controllers: str = Field(
        KUEUE_CONTROLLERS,
        max_length=16_384,
        pattern=r"^([a-z0-9]+(\.[a-z0-9.-]+)?(,[a-z0-9]+(\.[a-z0-9.-]+)?)*)?$",
        description="Resources that may stand between a pod and the owner of its Workload, by comma, each as kubectl names it (jobs.batch): their metadata are read. A pod with a controller of another kind is not evicted where its namespace has Workloads.",
    )
    burst_enabled: bool = Field(
        False,
        description="Whether pods may use more than their guarantees: then a pod's burst limit is a preference of its placement. Under development: leave it off.",
    )
    burst_overcommit: float | None = Field(
        None,
        ge=LEAST,
        le=MOST,
        description="What the memory limits of a GPU's containers may add up to, times its memory. 1 = the limits fit together. None: no bound.",
    )
    placeholder_config_map: str = Field(
        "",
        pattern=r"^([a-z0-9.-]+/[a-z0-9.-]+)?$",
        description="ConfigMap, as namespace/name, that remembers which pods had a placeholder for autoscalers, and owns the placeholders, which are in its namespace. It must exist. Empty: there are no placeholders.",
    )
    placeholder_most: int = Field(10, ge=1, le=1000, description="Placeholders at a time, in all.")
    placeholder_timeout_s: float = Field(
        900.0,
        ge=1,
        le=604800,
        description="Seconds for which a pod has a placeholder, from its first one on. Then none is made for it again.",
    )
    placeholder_priority_class: str = Field(
        "tangram-placeholder", min_length=1, description="PriorityClass of placeholders, of a value below 0."
    )
    placeholder_image: str = Field(
        "registry.k8s.io/pause:3.10",
        min_length=1,
        description="Image that placeholders name. It is never pulled.",
    )
    scheduler_name: str = Field(
        "tangram-scheduler",
        min_length=1,
        description="Scheduler name of the pods that nominate-ahead is about.",
    )
    scheduler_process: str = Field(
        "",
        max_length=64,
        description="Name of kube-scheduler's process beside this one. If pods wait, an extender that is younger ends it, so that its next start retries them. Empty: never.",
    )
    nominate_ahead: Literal["auto", "always", "never"] = Field(
        "auto",
        description="Whether waiting pods are nominated ahead of their scheduling cycle. auto: if kube-scheduler is faster with it, by the time between its calls.",
    )
    kubeconfig: str = Field("", description="Kubeconfig file. Empty: in-cluster, or $KUBECONFIG.")

    @property
    def names(self) -> Names:
        """Resource and annotation names."""
        return Names(self.domain)

    @property
    def unit_mib(self) -> int:
        """MiB in one gpu-mem."""
        return MEMORY_UNITS_MIB[self.memory_unit]

"""What an operator may set, from the command line or from environment variables TANGRAM_DEVICEPLUGIN_<NAME>."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import Field, field_validator

from observe.options import ProgramSettings, config
from vgpu.api.host_pool import REPORT_AFTER_S, SHARED_GPUS, STALE_S, STATUS
from vgpu.api.names import DEFAULT, DEFAULT_OVER_LIMIT_ACTION, Names, OverLimitAction
from vgpu.api.overcommit import LEAST, MOST
from vgpu.api.quantity import MEMORY_UNITS_MIB
from vgpu.health.owners import RETURN_S
from vgpu.health.pod_policy import PodPolicy, policy_from_text
from vgpu.health.selection import ALLOWED, EVERY, Selection, selection_from_list
from vgpu.health.taints import Effect
from vgpu.mig.declared import label_keys


class DevicePluginSettings(ProgramSettings):
    """Tangram's device plugin: offers shares of this node's GPUs to the kubelet, and gives each container what its pod was assigned.

    One runs on each node that has GPUs, as root, beside the arbiter. It finds the driver under the driver root (a folder with lib/libnvidia-ml.so.1 or usr/lib/.../libnvidia-ml.so.1, dev/nvidia0, ...), publishes what it finds as the node's annotation tangram.sh/inventory, and registers tangram.sh/gpu-mem, gpu-core, gpu and mig-<profile> with the kubelet.

    tangram-deviceplugin --node-name "$(hostname)" --kubeconfig ~/.kube/config --driver-root /usr/local/nvidia --access cdi

    Then `kubectl describe node` shows tangram.sh/gpu-mem, and `curl localhost:9402/readyz` reports what is missing, if anything.

    Every flag can be set as an environment variable, TANGRAM_DEVICEPLUGIN_ and its name in capitals: TANGRAM_DEVICEPLUGIN_NODE_NAME=node-1.
    """

    model_config = config("tangram-deviceplugin", "TANGRAM_DEVICEPLUGIN_")

    node_name: str = Field(min_length=1, description="name of the node this runs on (required)")
    state_root: Path = Field(
        Path("/var/lib/tangram"),
        description="folder for the library and the grants; the same path here and on the host, as the kubelet mounts from it",
    )
    driver_root: Path = Field(
        Path("/"),
        description="folder below which the NVIDIA driver's files are, as seen from here: docs/operations/cdi.md lists where it is looked for",
    )
    host_driver_root: Path | None = Field(
        None, description="the same folder as the host sees it, for CDI specs; the default is driver-root"
    )
    kubelet_dir: Path = Field(Path("/var/lib/kubelet"), description="the kubelet's folder, with device-plugins in it")
    pod_resources_socket: Path | None = Field(
        None, description="the kubelet's pod resources socket; the default is pod-resources/kubelet.sock in kubelet-dir"
    )
    access: Literal["auto", "cdi", "nvidia"] = Field(
        "auto",
        description="how containers get their GPUs: CDI devices that this plugin describes, or NVIDIA's container runtime",
    )
    memory_unit: Literal["1Gi", "512Mi", "256Mi"] = Field("1Gi", description="one unit of gpu-mem")
    domain: str = Field(DEFAULT.domain, min_length=1, description="domain of the resource and annotation names")
    cdi_dir: Path = Field(Path("/var/run/cdi"), description="folder that the container runtime reads CDI specs from")
    cdi_specs: Literal["auto", "own"] = Field(
        "auto",
        description="what the CDI devices are described by: NVIDIA's specification, or one that nvidia-ctk makes, where it is true of this machine, else our own; or our own alone",
    )
    library: Path = Field(
        Path("/opt/tangram/lib/libtangram.so"), description="the interception library that containers are given"
    )
    trial_program: Path = Field(
        Path("/opt/tangram/lib/tangram-trial"),
        description="the program on which suspending is tried, once a boot for each driver and GPU model",
    )
    guard_policy: OverLimitAction = Field(
        DEFAULT_OVER_LIMIT_ACTION,
        description="what happens to a container over its limit; a pod may request a stricter policy, not a weaker one",
    )
    latency_critical_namespaces: list[str] = Field(
        ["*"], description="namespaces whose pods may be latency-critical, also by an edit; * = all"
    )
    clear_memory: bool = Field(False, description="whether memory is zeroed before a container is handed it")
    burst_enabled: bool = Field(
        False, description="whether containers may use more than their guarantee; under development: leave it off"
    )
    pod_conditions: bool = Field(
        False,
        description="whether conditions of pods say that a container is over its memory limit, or stranded; it needs a right that the chart gives with burst.enabled and policy.enabled",
    )
    burst_max: dict[str, str] = Field(
        {},
        description="namespace, or * for every other one, to the largest burst limit of memory that its pods may have; empty: no bound",
    )
    host_pool: str = Field(
        "", description="size of the node's host pool, such as 64Gi; empty: the node has none, and nothing is swapped"
    )
    host_pool_request: dict[str, str] = Field(
        {},
        description='what the host pool\'s pod requests of the node, e.g. {"memory": "65Gi"}: an Event says so if the node never has it',
    )
    host_pool_report_s: float = Field(
        REPORT_AFTER_S,
        gt=STALE_S,
        le=86_400,
        description="seconds that the host pool may be missing before an Event on the node says why; its program counts as gone when it was silent for 30 of them",
    )
    copier_context_mib: int = Field(
        520,
        ge=0,
        le=65_536,
        description="memory of each GPU that is not in MIG mode that the host pool's copier takes: taken off what pods may have, if there is a host pool",
    )
    burst_overcommit: float | None = Field(
        None,
        ge=LEAST,
        le=MOST,
        description="what the memory limits of a GPU's containers may add up to, times its memory; as the extender has it; none: no bound",
    )
    proc_root: Path = Field(
        Path("/proc"), description="the node's /proc, as seen from here: whose processes still run is read there"
    )
    status_socket: Path | None = Field(
        None, description="the arbiter's status socket; the default is arbiter/status.sock in state-root"
    )
    kubeconfig: str | None = Field(None, description="a kubeconfig file; the default is the pod's service account")
    metrics_host: str = Field("0.0.0.0", description="address that /metrics, /healthz and /readyz listen on")  # noqa: S104
    metrics_port: int = Field(
        9402, ge=0, le=65535, description="port of /metrics, /healthz and /readyz; 0 takes any free one"
    )
    metrics_access: Literal["open", "review"] = Field(
        "open",
        description="which clients may read /metrics: all that reach the port, or those with a bearer token that the API server accepts for a get of the nonResourceURL /metrics; then tokens for the arbiter's port are reviewed too",
    )
    health_s: float = Field(5.0, gt=0, le=3600, description="seconds between questions to each GPU whether it is well")
    probe_s: float = Field(
        60.0, gt=0, le=86_400, description="seconds between checks which GPUs and MIG instances exist"
    )

    gpus: list[str] = Field(
        [EVERY],
        description=f"which of the node's GPUs are Tangram's: a list of selectors, each of terms {ALLOWED}; another plugin may have the rest",
    )

    clash_return_s: float = Field(
        RETURN_S,
        ge=0,
        le=86_400,
        description="seconds after which a GPU is offered again that another device plugin, or a DRA driver, no longer offers; one that restarts seems to be gone for some",
    )

    unhealthy_gpu_pods: str = Field(
        "leave",
        description="what happens to pods whose GPU is unhealthy or no longer there: leave, evict, or evict-after: 5m; a degraded GPU is no reason",
    )

    node_labels: bool = Field(
        True,
        description="whether labels of the node say what GPUs it has (tangram.sh/gpu.model and others); false: they are removed",
    )
    self_test: bool = Field(
        True,
        description="whether a GPU is tried before pods get it again, after it was cordoned or unhealthy: memory is allocated, copied and compared, and work is suspended and resumed",
    )

    unhealthy_taint: Literal["none", "NoSchedule", "PreferNoSchedule"] = Field(
        "none",
        description="effect of the node's taint tangram.sh/gpu-unhealthy while a GPU is unhealthy; it keeps pods off the node's healthy GPUs too; none: it is removed",
    )
    startup_taint: bool = Field(
        True,
        description="whether the taint tangram.sh/not-ready, which a node group may set on new nodes, is removed once new pods get a GPU of the node and the kubelet reports its devices",
    )
    numa: bool = Field(
        False,
        description="whether devices name their NUMA nodes where the kubelet's TopologyManager refuses pods that it cannot align (policies restricted and single-numa-node), and the node's annotation tangram.sh/numa says what that depends on",
    )
    kubelet_config: Path = Field(
        Path("/var/lib/kubelet/config.yaml"),
        description="the kubelet's configuration file, as seen from here, of which the fields about alignment are read; flags and drop-in files are not",
    )
    kubelet_topology: dict[str, Any] = Field(
        {}, description="these fields instead of the file, as KubeletConfiguration has them; empty: the file is read"
    )
    numa_nodes_dir: Path = Field(
        Path("/sys/devices/system/node"), description="the kernel's folder of NUMA nodes, as seen from here"
    )
    mig_profiles: list[str] = Field(
        ["*"],
        description="MIG profiles that kube-scheduler leaves to Tangram; the node offers no others and reports them; * = all",
    )
    mig_on_demand: bool = Field(
        False,
        description="whether the MIG instances of GPUs in MIG mode are made when pods request them, where nobody else made one",
    )
    mig_idle_s: float = Field(
        30.0,
        ge=0,
        le=86_400,
        description="seconds that a MIG instance on demand stays when no pod has it; 0: it is removed at once",
    )

    mig_config_file: Path | None = Field(
        None,
        description="file of MIG layouts in the format of mig-parted; the node's label tangram.sh/mig.config, or nvidia.com/mig.config, names the one that this plugin applies; none: no layout is declared",
    )
    mig_mode_idle_s: float = Field(
        0.0,
        ge=0,
        le=86_400,
        description="seconds that a GPU must have been idle before its MIG mode is switched as its layout declares it; 0: never",
    )

    nvml_start_s: float = Field(
        120.0,
        gt=0,
        le=3600,
        description="seconds that the start of NVML may take, which without persistence mode initialises every GPU",
    )
    nvml_call_s: float = Field(
        10.0,
        gt=0,
        le=600,
        description="seconds that a call of NVML may take; then its process is killed and another one started",
    )

    @field_validator("gpus")
    @classmethod
    def _selectors_are_known(cls, selectors: list[str]) -> list[str]:
        selection_from_list(selectors)
        return selectors

    @field_validator("unhealthy_gpu_pods")
    @classmethod
    def _policy_is_known(cls, text: str) -> str:
        policy_from_text(text)
        return text

    @property
    def unhealthy_gpu_policy(self) -> PodPolicy:
        """For pods whose GPU is unhealthy."""
        return policy_from_text(self.unhealthy_gpu_pods)

    @property
    def selection(self) -> Selection:
        """Which GPUs are Tangram's."""
        return selection_from_list(self.gpus)

    @property
    def node_label_keys(self) -> frozenset[str]:
        """Of the node's labels that are read."""
        return self.selection.label_keys.union(label_keys(self.names) if self.mig_config_file else ())

    @property
    def taint_effect(self) -> Effect | None:
        """Of the taint while a GPU is unhealthy; None: the node gets none."""
        return None if self.unhealthy_taint == "none" else self.unhealthy_taint

    @property
    def names(self) -> Names:
        """Resource and annotation names."""
        return Names(self.domain)

    @property
    def unit_mib(self) -> int:
        """One unit of gpu-mem in MiB."""
        return MEMORY_UNITS_MIB[self.memory_unit]

    @property
    def host_root(self) -> Path:
        """The driver root as the host sees it."""
        return self.host_driver_root or self.driver_root

    @property
    def pod_resources(self) -> Path:
        """The kubelet's pod resources socket."""
        return self.pod_resources_socket or self.kubelet_dir / "pod-resources/kubelet.sock"

    @property
    def status(self) -> Path:
        """The arbiter's status socket."""
        return self.status_socket or self.state_root / "arbiter/status.sock"

    @property
    def plugin_folder(self) -> Path:
        """What the plugin writes for the arbiter."""
        return self.state_root / "plugin"

    @property
    def mig_folder(self) -> Path:
        """Where it is recorded which MIG instances were made on demand."""
        return self.state_root / "mig"

    @property
    def nvml_socket(self) -> Path:
        """The socket by which the arbiter queries NVML."""
        return self.plugin_folder / "nvml.sock"

    @property
    def access_socket(self) -> Path:
        """Where the arbiter has tokens reviewed."""
        return self.plugin_folder / "access.sock"

    @property
    def nvml_released(self) -> Path:
        """While this file exists, nothing of ours has a GPU open."""
        return self.plugin_folder / "nvml.released"

    @property
    def nvml_withheld(self) -> Path:
        """PCI addresses of GPUs that NVML does not open."""
        return self.plugin_folder / "nvml.withheld"

    @property
    def untested_gpus(self) -> Path:
        """GPUs that are away, and are tried when they come back."""
        return self.plugin_folder / "gpus.untested"

    @property
    def shared_gpus(self) -> Path:
        """Which GPUs the host pool serves."""
        return self.plugin_folder / SHARED_GPUS

    @property
    def host_pool_status(self) -> Path:
        """What the host pool's program writes."""
        return self.state_root / "copiers" / STATUS

    @property
    def device_plugins(self) -> Path:
        """Where the kubelet looks for plugins' sockets."""
        return self.kubelet_dir / "device-plugins"

"""What an operator sets, by environment variables or flags. Turns into the `AdmissionRules` and `CertificateLocations` that the rest reads."""

from __future__ import annotations

from math import inf
from pathlib import Path
from typing import Literal, Self

from pydantic import Field, field_validator, model_validator

from observe.options import ProgramSettings, config
from vgpu.api.burst import BurstBound, amount_mib
from vgpu.api.confinement import NODE_FOLDERS
from vgpu.api.errors import BadRequest
from vgpu.api.names import CLASSES, DEFAULT_POLICY, POLICY_NAMES, Names
from vgpu.api.quantity import MEMORY_UNITS_MIB, MIB, whole_number
from webhook.admission_rules import EVERYWHERE, LARGEST_GPU_MIB, AdmissionRules
from webhook.certificate_keeper import CertificateLocations


class Settings(ProgramSettings):
    """Tangram's admission webhook: denies pods whose request no cluster could serve, and prepares the others.

    Every flag can be set as an environment variable, TANGRAM_WEBHOOK_ and its name in capitals: TANGRAM_WEBHOOK_MEMORY_UNIT=512Mi. Lists and mappings are JSON there: TANGRAM_WEBHOOK_POLICIES='["binpack"]'.
    """

    model_config = config("tangram-webhook", "TANGRAM_WEBHOOK_")

    domain: str = Field("tangram.sh", min_length=1, description="Domain of every resource and annotation name.")
    memory_unit: Literal["1Gi", "512Mi", "256Mi"] = Field("1Gi", description="What one gpu-mem stands for.")
    scheduler_name: str = Field("tangram-scheduler", description="Scheduler given to pods that name none.")
    other_schedulers: list[str] = Field(
        [], description="Further schedulers that run Tangram's extender; pods may name them."
    )
    runtime_class: str = Field("", description="RuntimeClass given to pods that name none. Empty: none is given.")
    policies: list[str] = Field(
        list(POLICY_NAMES), description="Placement policies that a pod may name, of docs/reference/policies.md."
    )
    default_policy: str = Field(DEFAULT_POLICY, description="Policy of pods that name none. One of policies.")
    largest_gpu: str = Field(
        f"{LARGEST_GPU_MIB}Mi", description="A share that requests more memory than this on one GPU is denied at once."
    )
    privileged: Literal["deny", "warn"] = Field(
        "deny",
        description="A pod with a share that is privileged, has hostPID, SYS_ADMIN and the like, or a folder of the node's own.",
    )
    privileged_namespaces: list[str] = Field([], description="Namespaces where such pods are admitted with a warning.")
    state_root: str = Field("/var/lib/tangram", description="Tangram's folder on nodes: no hostPath of such a pod.")
    kubelet_dir: str = Field(
        "/var/lib/kubelet", description="The kubelet's folder on nodes: no hostPath of such a pod."
    )
    cdi_dir: str = Field("/var/run/cdi", description="Folder of CDI specs on nodes: no hostPath of such a pod.")
    latency_critical_namespaces: list[str] = Field(
        [EVERYWHERE], description="Namespaces whose pods may be of class latency-critical. *: every one. Empty: none."
    )
    classes_by_priority_class: dict[str, str] = Field(
        {}, description="PriorityClass to service class, for pods that name the one and not the other."
    )
    priority_classes: dict[str, str] = Field(
        {}, description="Service class to PriorityClass, for pods that name none. Empty: none is given."
    )
    mig_on_demand: bool = Field(
        False,
        description="Whether nodes may make MIG instances on demand: containers with MIG instances then get no variable that names their GPUs. Every device plugin must know MIG on demand.",
    )
    burst_enabled: bool = Field(
        False, description="Whether containers may use more than their guarantee. Under development: leave it off."
    )
    burst_default: dict[str, str] = Field(
        {}, description="Namespace, or * for every other one, to the burst limit of memory of pods that write none."
    )
    burst_max: dict[str, str] = Field(
        {},
        description="Namespace, or * for every other one, to the largest burst limit of memory that its pods may write. Empty: no bound.",
    )

    host: str = Field("0.0.0.0", description="Address to listen on.")  # noqa: S104 - a pod's own address
    port: int = Field(8443, ge=0, le=65535, description="HTTPS port of /mutate.")
    metrics_port: int = Field(8080, ge=0, le=65535, description="HTTP port of /healthz, /readyz and /metrics.")
    drain_s: float = Field(
        5.0,
        ge=0,
        le=60,
        description="Seconds between SIGTERM and closing the port, while the Service forgets this pod.",
    )

    cert_mode: Literal["self", "files"] = Field(
        "self",
        description="Where the certificate is from. self: own CA in a Secret. files: a folder that cert-manager keeps fresh.",
    )
    cert_folder: Path = Field(Path("/certs"), description="Folder with tls.crt and tls.key (cert mode files).")
    cert_check_s: float = Field(
        20.0,
        gt=0,
        le=86_400,
        description="Seconds between checks of the certificates: a Secret or caBundle that was deleted is restored within this time.",
    )
    namespace: str = Field("tangram", description="Namespace of the Secret and the Service.")
    secret_name: str = Field("tangram-webhook-certs", description="Secret of CA and certificate (cert mode self).")
    configuration_name: str = Field(
        "tangram", description="MutatingWebhookConfiguration whose caBundle is kept (cert mode self)."
    )
    dns_names: list[str] = Field(
        [], description="Names in the certificate. Empty: tangram-webhook.NAMESPACE.svc and its longer forms."
    )
    kubeconfig: str = Field("", description="Kubeconfig file. Empty: in-cluster, or $KUBECONFIG.")

    @field_validator("largest_gpu")
    @classmethod
    def _is_bytes(cls, text: str) -> str:
        if whole_number(text, what="largest_gpu") < MIB:
            raise ValueError(f"{text} is less than 1 MiB: write bytes, such as 141Gi")
        return text

    @field_validator("policies")
    @classmethod
    def _names_policies(cls, policies: list[str]) -> list[str]:
        if unknown := sorted(set(policies) - set(POLICY_NAMES)):
            raise ValueError(f"{', '.join(unknown)}: placement policies are {', '.join(POLICY_NAMES)}")
        return policies

    @model_validator(mode="after")
    def _allows_its_default_policy(self) -> Self:
        if self.default_policy not in self.policies:
            raise ValueError(
                f"policies are {', '.join(self.policies) or 'none'}: default_policy is {self.default_policy}, which must be one, for pods that name none"
            )
        return self

    @model_validator(mode="after")
    def _defaults_to_bursts_that_it_allows(self) -> Self:
        for namespace, text in self.burst_max.items():
            self._burst_mib(text, f"burst_max of namespace {namespace}")
        for namespace, text in self.burst_default.items():
            what, bound = f"burst_default of namespace {namespace}", BurstBound.of(namespace, self.burst_max)
            most = 0 if bound.most is None else self._burst_mib(bound.most, "burst_max")
            if self._burst_mib(text, what) > most:
                raise ValueError(f"{what} is {text}: it must be at most its burst_max, which is {bound.most}")
        return self

    def _burst_mib(self, text: str, what: str) -> float:
        try:
            mib = amount_mib(text, unit_mib=MEMORY_UNITS_MIB[self.memory_unit], what=what)
        except BadRequest as error:
            raise ValueError(str(error)) from None
        return inf if mib is None else mib

    @field_validator("priority_classes")
    @classmethod
    def _names_classes(cls, mapping: dict[str, str]) -> dict[str, str]:
        if unknown := sorted(set(mapping) - set(CLASSES)):
            raise ValueError(f"{', '.join(unknown)}: service classes are {', '.join(CLASSES)}")
        return mapping

    @field_validator("classes_by_priority_class")
    @classmethod
    def _leads_to_classes(cls, mapping: dict[str, str]) -> dict[str, str]:
        if unknown := sorted(set(mapping.values()) - set(CLASSES)):
            raise ValueError(f"{', '.join(unknown)}: service classes are {', '.join(CLASSES)}")
        return mapping

    def rules(self) -> AdmissionRules:
        """How pods are admitted."""
        return AdmissionRules(
            names=Names(self.domain),
            unit_mib=MEMORY_UNITS_MIB[self.memory_unit],
            scheduler_name=self.scheduler_name,
            other_schedulers=frozenset(self.other_schedulers),
            runtime_class=self.runtime_class,
            policies=tuple(self.policies),
            default_policy=self.default_policy,
            largest_gpu_mib=whole_number(self.largest_gpu, what="largest_gpu") // MIB,
            privileged=self.privileged,
            privileged_namespaces=frozenset(self.privileged_namespaces),
            node_folders=NODE_FOLDERS
            | {
                self.state_root: "Tangram's grants and the arbiter's sockets",
                self.kubelet_dir: "volumes and secrets of other pods, and the kubelet's records of devices",
                self.cdi_dir: NODE_FOLDERS["/etc/cdi"],
            },
            latency_critical_namespaces=frozenset(self.latency_critical_namespaces),
            classes_by_priority_class=self.classes_by_priority_class,
            priority_classes=self.priority_classes,
            mig_on_demand=self.mig_on_demand,
            burst_enabled=self.burst_enabled,
            burst_default=self.burst_default,
            burst_max=self.burst_max,
        )

    def locations(self) -> CertificateLocations:
        """Where the certificates are."""
        service = f"tangram-webhook.{self.namespace}.svc"
        names = tuple(self.dns_names) or (service, f"{service}.cluster.local")
        return CertificateLocations(self.namespace, self.secret_name, self.configuration_name, names)

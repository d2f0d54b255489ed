"""The fault matrix: the part that is hit, the fault, the step of a pod's life, and what pods notice meanwhile. Data only.

The matrix does not try every combination. Each (part, fault) is tried at least once, or `NOT_TRIED` has the reason why not; and each
step meets each fault at least once. tests/unit/e2e checks both, and compares docs/development/faults.md with this table.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Final, Literal

Fault = Literal["kill", "stop", "starve", "hang", "lose"]
Step = Literal["placing", "bound", "allocated", "running", "deleting", "forced"]
Part = Literal[
    "device plugin", "arbiter", "supervisor", "NVML child", "kubelet", "extender", "webhook", "container", "containerd",
    "containerd-shim", "API server",
]  # fmt: skip

FAULTS: Final[dict[Fault, str]] = {
    "kill": "SIGKILL",
    "stop": "SIGSTOP, and SIGCONT 3 s later",
    "starve": "2 % of one processor for 5 s",
    "hang": "a call that does not return, or peers that connect and send nothing",
    "lose": "a file or a socket is deleted, or an object of the API is changed",
}
STEPS: Final[dict[Step, str]] = {
    "placing": "between the pod's creation and its Binding",
    "bound": "between the Binding and Allocate",
    "allocated": "between Allocate and the start of the container",
    "running": "the container runs and works",
    "deleting": "the pod is being deleted, and its processes still run",
    "forced": "the pod was deleted by force, and its processes still run",
}
STOP_S: Final = 3.0
STARVE_S: Final = 5.0
STARVED_PERCENT: Final = 2


@dataclass(frozen=True, slots=True)
class Row:
    """One fault and the steps at which it is tried."""

    part: Part
    fault: Fault
    steps: tuple[Step, ...]
    meanwhile: str
    """What pods notice, for the page."""
    what: str = ""
    """The file that is lost, or what hangs."""
    within_s: float = 30.0
    """After the fault is over, everything runs again within this."""
    report_s: float = 5.0
    """What cannot be enforced or counted is reported within this."""
    reason: str = ""
    """Why limits are not enforced meanwhile, as the arbiter must report during the round."""
    preempts: bool = False
    """At the step `placing`, pods of less priority use the capacity first."""
    replaced: bool = False
    """All pods are replaced after the round: until then the kubelet does not count them."""
    ci: tuple[Step, ...] = ()
    """The steps that CI tries; `make faults` tries all."""


@dataclass(frozen=True, slots=True)
class Round:
    """One cell of the matrix."""

    row: Row
    step: Step

    @property
    def name(self) -> str:
        """As pytest prints it."""
        return "-".join(
            word.replace(" ", "_") for word in (self.row.part, self.row.fault, self.row.what, self.step) if word
        )


NONE: Final = "nothing"
LATER: Final = "a pod that starts now starts later"
ADMISSION: Final = "running pods: nothing. A pod that reaches Allocate now fails with UnexpectedAdmissionError, and its controller makes another"
WAITS: Final = "running pods: nothing. A pod that is created now is admitted and placed later"

ROWS: Final[tuple[Row, ...]] = (
    Row("device plugin", "kill", ("placing", "bound", "allocated", "deleting", "forced"), ADMISSION, ci=("forced",)),
    Row("device plugin", "stop", ("bound", "allocated", "running", "forced"), LATER, ci=("bound",)),
    Row("device plugin", "starve", ("allocated", "forced"), LATER),
    Row("device plugin", "hang", ("bound", "running"), NONE, what="silent peers"),
    Row("device plugin", "lose", ("allocated", "running", "deleting"), NONE, what="allocation record"),
    Row("device plugin", "lose", ("running", "forced"), NONE, what="pod records", ci=("forced",)),
    Row("device plugin", "lose", ("placing", "bound"), ADMISSION, what="plugin sockets"),
    Row("device plugin", "lose", ("placing", "allocated"), LATER, what="CDI specification", ci=("allocated",)),
    Row("device plugin", "lose", ("placing", "running"), WAITS, what="inventory annotation"),
    Row("device plugin", "lose", ("bound", "running"), NONE, what="installed library"),
    Row("device plugin", "lose", ("running",), "a new process is refused until the grant is back", what="grant file"),
    Row("device plugin", "lose", ("running",), NONE, what="verdicts of the trials"),
    Row("arbiter", "kill", ("placing", "allocated", "running", "deleting"), "a new process, and one that needs more memory, waits up to a second", ci=("running",)),
    Row("arbiter", "stop", ("allocated", "running", "deleting"), "an allocation beyond the lease is refused after 2 s of silence; suspended processes resume themselves after 0.6 s; *unenforced{arbiter-stalled}*", reason="arbiter-stalled", ci=("running",)),
    Row("arbiter", "starve", ("bound", "running"), "as while it is stopped", ci=("running",)),
    Row("arbiter", "hang", ("running", "placing"), NONE, what="silent peers", ci=("running",)),
    Row("arbiter", "lose", ("running", "deleting"), "`tangramctl ps` sees nothing until the socket is back", what="status socket"),
    Row("arbiter", "lose", ("running", "allocated"), "a new process waits until the socket is back", what="grant sockets", ci=("running",)),
    Row("supervisor", "kill", ("running", "bound"), "as when the arbiter is killed, and the kubelet starts the container again"),
    Row("supervisor", "stop", ("running",), NONE),
    Row("supervisor", "starve", ("allocated",), NONE),
    Row("NVML child", "kill", ("running", "allocated"), NONE, ci=("running",)),
    Row("NVML child", "stop", ("running",), NONE),
    Row("NVML child", "starve", ("placing", "running"), NONE),
    Row("NVML child", "hang", ("running", "placing", "allocated", "deleting"), "the node offers no GPU; running pods go on; *unenforced{nvml}*", what="nvmlDeviceGetMemoryInfo", within_s=60, reason="nvml"),
    Row("NVML child", "lose", ("running",), "*unenforced{nvml}* if the arbiter restarts before the socket is back", what="NVML socket"),
    Row("kubelet", "kill", ("placing", "bound", "allocated", "running", "deleting", "forced"), LATER, ci=("allocated",)),
    Row("kubelet", "stop", ("allocated", "forced"), LATER),
    Row("kubelet", "starve", ("bound", "deleting"), LATER),
    Row("kubelet", "lose", ("running",), "nothing at first; the kubelet may end them (OutOftangram.sh/gpu-mem) whenever it starts, until they are replaced", what="kubelet's checkpoint", report_s=40, replaced=True),
    Row("extender", "kill", ("placing", "deleting", "forced"), WAITS + ". If pods wait, kube-scheduler restarts too", preempts=True, ci=("placing",)),
    Row("extender", "stop", ("placing", "forced"), WAITS, preempts=True),
    Row("extender", "starve", ("placing", "forced"), WAITS, preempts=True),
    Row("extender", "hang", ("placing",), NONE, what="silent peers"),
    Row("webhook", "kill", ("placing",), WAITS),
    Row("webhook", "stop", ("placing",), WAITS),
    Row("webhook", "starve", ("placing",), WAITS),
    Row("webhook", "hang", ("placing",), NONE, what="silent peers"),
    Row("webhook", "lose", ("placing",), NONE, what="webhook's Secret", within_s=60),
    Row("webhook", "lose", ("placing",), "the API server refuses pods that request GPUs until the bundle is right again", what="webhook's caBundle", within_s=60),
    Row("container", "kill", ("running", "deleting", "forced"), "the container starts again with the same GPU and the same grant", ci=("running",)),
    Row("container", "stop", ("running", "deleting"), "its siblings cannot use what it leased; *unenforced{silent-process}* after 2 s"),
    Row("container", "starve", ("running", "deleting"), NONE),
    Row("container", "hang", ("running", "bound", "forced"), "the call takes as long as it takes", what="cuMemAlloc_v2"),
    Row("containerd", "kill", ("allocated", "running"), LATER),
    Row("containerd", "stop", ("bound", "deleting"), "the kubelet's calls hang: " + LATER, ci=("deleting",)),
    Row("containerd", "starve", ("allocated",), LATER),
    Row("containerd-shim", "kill", ("running",), "the container ends and starts again", within_s=60),
    Row("API server", "stop", ("placing", "bound", "allocated", "running", "deleting"), "running pods: nothing. Whatever the API has to be asked waits"),
)  # fmt: skip

_OTHERS: Final = "has no file or socket on the node that could be lost"
_CALLS: Final = "makes no call that could hang for longer than a stop does"
NOT_TRIED: Final[dict[tuple[Part, Fault], str]] = {
    ("supervisor", "hang"): f"{_CALLS}: it waits for its child alone",
    ("supervisor", "lose"): _OTHERS,
    ("kubelet", "hang"): "its calls of the container runtime hang while containerd is stopped",
    ("extender", "lose"): f"{_OTHERS}: the inventory that it reads is tried with the device plugin",
    ("container", "lose"): "what it mounts is tried with the device plugin and the arbiter",
    ("containerd", "hang"): "a stop of containerd is that",
    (
        "containerd",
        "lose",
    ): "its files are not Tangram's; the CDI specification that it reads is tried with the device plugin",
    ("containerd-shim", "stop"): "containerd's calls of it hang, as while containerd is stopped",
    ("containerd-shim", "starve"): "as a stop of it",
    ("containerd-shim", "hang"): "as a stop of it",
    ("containerd-shim", "lose"): "its files are containerd's",
    ("API server", "kill"): "etcd keeps all; for Tangram it is as a stop",
    ("API server", "starve"): "as a stop of it",
    ("API server", "hang"): "a stop of it is that",
    ("API server", "lose"): "objects that are changed or deleted are tried with the part that owns them",
}


def rounds(seed: int, *, everything: bool) -> list[Round]:
    """CI's cells or all of them, in an order that the seed decides."""
    chosen = [Round(row, step) for row in ROWS for step in (row.steps if everything else row.ci)]
    random.Random(seed).shuffle(chosen)
    return chosen

"""`make demo`: Tangram from nothing to pods that share a GPU, each step shown with the command that a user would type.

Brings up a local cluster (or takes the one in KUBECONFIG), installs the chart, and lets the cluster speak for itself: what the demo
prints about pods and nodes is what kubectl printed.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.rule import Rule

from hack.kubectl import CommandFailed, Kubectl
from hack.stack import NAMESPACE, ROOT, install_chart, install_fake_driver
from hack.waiting import NotSoon, eventually

CARDS: Final = "card h200\n"
"""One H200, as the fake driver is told."""

PODS: Final = ROOT / "examples/01-shares/pods.yaml"
GREEDY: Final = ROOT / "examples/02-past-the-grant/pod.yaml"
HUGE: Final = ROOT / "examples/03-fits-nowhere/pod.yaml"
DEMO: Final = "tangram-demo"

REAL_GPU_VALUES: Final = {"driver": {"root": "/"}, "node": {"privileged": "auto", "plugin": {"extraEnv": []}}}
POD_COLUMNS: Final = "POD:.metadata.name,GPU:.metadata.annotations.tangram\\.sh/gpus\\.main,STATUS:.status.phase"
EVENT_COLUMNS: Final = "REASON:.reason,MESSAGE:.message"


class Demo:
    """The steps, and how they are told."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.started = time.monotonic()
        self.step_number = 0

    def step(self, title: str, why: str = "") -> None:
        """A heading with the time since the start."""
        self.step_number += 1
        self.console.print()
        took_s = time.monotonic() - self.started
        self.console.print(Rule(f"[bold]{self.step_number}. {title}[/]  [dim]{took_s:.0f} s[/]", align="left"))
        if why:
            self.console.print(why, style="dim", highlight=False)

    def say_command(self, command: str) -> None:
        """What a user would type."""
        self.console.print(f"$ {command}", style="cyan", highlight=False, markup=False, soft_wrap=True)

    def show(self, kubectl: Kubectl, *arguments: str, only: tuple[str, ...] = ()) -> None:
        """Print a kubectl command and what it says; `only` keeps the lines that contain one of these."""
        self.say_command(f"kubectl {' '.join(arguments)}")
        lines = [line for line in kubectl(*arguments).splitlines() if not only or any(word in line for word in only)]
        self.console.print("\n".join(lines), highlight=False, markup=False, soft_wrap=True)

    def in_demo(self, kubectl: Kubectl, *arguments: str) -> None:
        """`show` in the demo's namespace."""
        self.show(kubectl, "-n", DEMO, *arguments)

    def cluster(self) -> None:
        """Images and a cluster of our own."""
        self.step("A Kubernetes cluster on this machine", "Built and started the first time; seconds when it is there.")
        for program in (["hack.images", "build"], ["hack.cluster", "up"], ["hack.cluster", "load"]):
            subprocess.run([sys.executable, "-m", *program], check=True, cwd=ROOT)

    def install(self, kubectl: Kubectl) -> str:
        """Driver if need be, and the chart. Returns the name of the node that offers GPUs."""
        self.step(
            "Install Tangram",
            "One chart: device plugin and arbiter on each GPU node, scheduler with extender, webhook.",
        )
        real = real_gpus_here()
        if not real:
            self.console.print(
                "No GPU here: a fake driver plays one H200 (real libcuda and NVML interfaces; memory is only counted)."
            )
            install_fake_driver(kubectl, CARDS)
        self.say_command(f"helm upgrade --install tangram deploy/helm/tangram -n {NAMESPACE}")
        install_chart(kubectl, REAL_GPU_VALUES if real else None)
        wait_for_gpus(kubectl)
        self.show(kubectl, "-n", NAMESPACE, "get", "pods")

        self.step("What the node offers", "gpu-mem counts GiB, gpu-core percent of a GPU's time, gpu whole cards.")
        node = kubectl("get", "nodes", "-o", "name").split()[0]
        self.show(kubectl, "describe", node, only=("Capacity:", "Allocatable:", "tangram.sh/gpu"))
        return node

    def share(self, kubectl: Kubectl, node: str) -> None:
        """Three pods on one GPU, and what each sees of it."""
        self.step("Three pods ask for pieces of one GPU", str(PODS.relative_to(ROOT)))
        fresh_namespace(kubectl)
        self.console.print(PODS.read_text(), highlight=False, markup=False)
        self.in_demo(kubectl, "apply", "-f", str(PODS.relative_to(ROOT)))
        kubectl("-n", DEMO, "wait", "--for=condition=Ready", "pod", "--all", "--timeout=120s")
        self.in_demo(kubectl, "get", "pods", "-o", f"custom-columns={POD_COLUMNS}")

        self.step("Each sees its own share, as CUDA and nvidia-smi tell it")
        for pod in ("chat", "embed", "notebook"):
            self.in_demo(kubectl, "exec", pod, "--", "gpuview")
        self.in_demo(kubectl, "exec", "chat", "--", "nvidia-smi")

        self.step("The node's books")
        self.show(kubectl, "describe", node, only=("Allocated resources:", "  Resource ", "tangram.sh/gpu"))

    def refuse(self, kubectl: Kubectl) -> None:
        """What is past a grant, and what fits nowhere."""
        self.step(
            "A pod that takes more than its grant",
            "It gets CUDA_ERROR_OUT_OF_MEMORY at its own limit; its neighbours go on.",
        )
        self.in_demo(kubectl, "apply", "-f", str(GREEDY.relative_to(ROOT)))
        kubectl("-n", DEMO, "wait", "--for=jsonpath={.status.phase}=Failed", "pod/greedy", "--timeout=120s")
        self.in_demo(kubectl, "logs", "greedy")
        self.in_demo(kubectl, "logs", "chat", "--tail=1")
        self.in_demo(kubectl, "get", "pods")

        self.step("A pod that fits nowhere", "It stays Pending, and its event says why.")
        self.in_demo(kubectl, "apply", "-f", str(HUGE.relative_to(ROOT)))
        wait_for_event(kubectl, "too-large", "FailedScheduling")
        self.in_demo(kubectl, "get", "pod", "too-large")
        of_pod = "involvedObject.name=too-large,reason=FailedScheduling"
        self.in_demo(kubectl, "get", "events", "--field-selector", of_pod, "-o", f"custom-columns={EVENT_COLUMNS}")

    def end(self, kubectl: Kubectl) -> None:
        """Where to go from here."""
        self.step("Done")
        program = shutil.which("kubectl", path=kubectl.path)
        self.console.print(
            f"The cluster stays up. Look around:\n\n"
            f"    export KUBECONFIG={kubectl.kubeconfig}\n    {program} -n {DEMO} get pods\n\n"
            "Clean up:\n\n    make cluster-down     # stops everything and leaves nothing behind but the build cache",
            highlight=False,
            soft_wrap=True,
        )


def real_gpus_here() -> bool:
    """Is there an NVIDIA driver on this machine?"""
    return Path("/dev/nvidiactl").exists() and Path("/proc/driver/nvidia").exists()


def fresh_namespace(kubectl: Kubectl) -> None:
    """The demo's namespace, without what an earlier run left."""
    kubectl("delete", "namespace", DEMO, "--ignore-not-found", "--wait", "--timeout=120s")
    kubectl("create", "namespace", DEMO)
    eventually(
        lambda: kubectl("-n", DEMO, "get", "serviceaccount", "default", "--ignore-not-found"),
        "the namespace's service account",
    )


def wait_for_gpus(kubectl: Kubectl) -> None:
    """Until a node offers gpu-mem."""
    look = "jsonpath={.items[*].status.allocatable['tangram\\.sh/gpu-mem']}"
    eventually(lambda: kubectl("get", "nodes", "-o", look).strip(" 0"), "a node that offers tangram.sh/gpu-mem")


def wait_for_event(kubectl: Kubectl, pod: str, reason: str) -> None:
    """Until a pod has an event of this reason."""
    selector = f"involvedObject.name={pod},reason={reason}"
    eventually(
        lambda: kubectl("-n", DEMO, "get", "events", "--field-selector", selector, "-o", "name"),
        f"event {reason} on {pod}",
    )


def main() -> int:
    """Bring up the cluster if none is named, then run the steps."""
    parser = argparse.ArgumentParser(
        prog="make demo", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.parse_args()
    console = Console(width=None if sys.stdout.isatty() else 120)
    demo = Demo(console)
    try:
        if "KUBECONFIG" not in os.environ:
            demo.cluster()
        kubectl = Kubectl.local()
        node = demo.install(kubectl)
        demo.share(kubectl, node)
        demo.refuse(kubectl)
        demo.end(kubectl)
    except (CommandFailed, NotSoon, subprocess.CalledProcessError) as error:
        console.print(f"\nThe demo stopped: {error}", style="red", markup=False, highlight=False, soft_wrap=True)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

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

from hack.cluster import __main__ as cluster_program
from hack.images import __main__ as images_program
from hack.kubectl import CommandFailed, Kubectl
from hack.stack import NAMESPACE, ROOT, install_chart, install_fake_driver

CARDS: Final = "card h200\n"
"""One H200, as the fake driver is told."""

PODS: Final = ROOT / "examples/01-shares/pods.yaml"
GREEDY: Final = ROOT / "examples/02-past-the-grant/pod.yaml"
HUGE: Final = ROOT / "examples/03-fits-nowhere/pod.yaml"
DEMO: Final = "tangram-demo"


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
        self.console.print(
            Rule(f"[bold]{self.step_number}. {title}[/]  [dim]{time.monotonic() - self.started:.0f} s[/]", align="left")
        )
        if why:
            self.console.print(why, style="dim", highlight=False)

    def show(self, kubectl: Kubectl, *arguments: str, only: tuple[str, ...] = ()) -> str:
        """Print a kubectl command and what it says; `only` keeps the lines that contain one of these."""
        self.console.print(f"$ kubectl {' '.join(arguments)}", style="cyan", highlight=False, soft_wrap=True)
        text = kubectl(*arguments)
        lines = [line for line in text.splitlines() if not only or any(word in line for word in only)]
        self.console.print("\n".join(lines), highlight=False, markup=False, soft_wrap=True)
        return text

    def run(self, kubectl: Kubectl) -> None:
        """Everything after the cluster is there."""
        real = real_gpus_here()
        self.step(
            "Install Tangram",
            "One chart: device plugin and arbiter on each GPU node, scheduler with extender, webhook.",
        )
        if not real:
            self.console.print(
                "No GPU here: a fake NVIDIA driver plays one H200 (real libcuda and NVML interfaces, memory is only counted)."
            )
            install_fake_driver(kubectl, CARDS)
        self.console.print(
            f"$ helm upgrade --install tangram deploy/helm/tangram -n {NAMESPACE}", style="cyan", highlight=False
        )
        install_chart(kubectl, {"driver": {"root": "/"}, "node": {"privileged": "auto"}} if real else None)
        wait_for_gpus(kubectl)
        self.show(kubectl, "-n", NAMESPACE, "get", "pods")

        self.step("What the node offers", "gpu-mem counts GiB, gpu-core percent of a GPU's time, gpu whole cards.")
        node = kubectl("get", "nodes", "-l", "!type", "-o", "name").split()[0]
        self.show(kubectl, "describe", node, only=("Capacity:", "Allocatable:", "tangram.sh/gpu"))

        self.step("Three pods ask for pieces of one GPU", str(PODS.relative_to(ROOT)))
        fresh_namespace(kubectl)
        self.console.print(PODS.read_text(), highlight=False, markup=False)
        self.show(kubectl, "-n", DEMO, "apply", "-f", str(PODS.relative_to(ROOT)))
        kubectl("-n", DEMO, "wait", "--for=condition=Ready", "pod", "--all", "--timeout=120s")
        self.show(
            kubectl,
            "-n",
            DEMO,
            "get",
            "pods",
            "-o",
            "custom-columns=POD:.metadata.name,GPU:.metadata.annotations.tangram\\.sh/gpus\\.main,STATUS:.status.phase",
        )

        self.step("Each sees its own share, as CUDA and nvidia-smi tell it")
        for pod in ("chat", "embed", "notebook"):
            self.show(kubectl, "-n", DEMO, "exec", pod, "--", "gpuview")
        self.show(kubectl, "-n", DEMO, "exec", "chat", "--", "nvidia-smi")

        self.step("The node's books")
        self.show(kubectl, "describe", node, only=("Allocated resources:", "Resource ", "tangram.sh/gpu"))

        self.step(
            "A pod that takes more than its grant",
            "It gets CUDA_ERROR_OUT_OF_MEMORY at its own limit; its neighbours go on.",
        )
        self.show(kubectl, "-n", DEMO, "apply", "-f", str(GREEDY.relative_to(ROOT)))
        kubectl("-n", DEMO, "wait", "--for=jsonpath={.status.phase}=Failed", "pod/greedy", "--timeout=120s")
        self.show(kubectl, "-n", DEMO, "logs", "greedy")
        self.show(kubectl, "-n", DEMO, "logs", "chat", "--tail=1")
        self.show(kubectl, "-n", DEMO, "get", "pods")

        self.step("A pod that fits nowhere", "It stays Pending, and its event says why.")
        self.show(kubectl, "-n", DEMO, "apply", "-f", str(HUGE.relative_to(ROOT)))
        wait_for_event(kubectl, "too-large", "FailedScheduling")
        self.show(kubectl, "-n", DEMO, "get", "pod", "too-large")
        self.show(
            kubectl,
            "-n",
            DEMO,
            "get",
            "events",
            "--field-selector",
            "involvedObject.name=too-large,reason=FailedScheduling",
            "-o",
            "custom-columns=REASON:.reason,MESSAGE:.message",
        )

        self.step("Done")
        self.console.print(
            f"The cluster stays up. Look around:\n\n    export KUBECONFIG={kubectl.kubeconfig}\n    {shutil.which('kubectl', path=kubectl.path)} -n {DEMO} get pods\n\n"
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
    wait_until(
        lambda: kubectl("-n", DEMO, "get", "serviceaccount", "default", "--ignore-not-found"),
        "the namespace's service account",
    )


def wait_for_gpus(kubectl: Kubectl) -> None:
    """Until a node offers gpu-mem."""
    look = "jsonpath={.items[*].status.allocatable['tangram\\.sh/gpu-mem']}"
    wait_until(lambda: kubectl("get", "nodes", "-o", look).strip(" 0"), "a node that offers tangram.sh/gpu-mem")


def wait_for_event(kubectl: Kubectl, pod: str, reason: str) -> None:
    """Until a pod has an event of this reason."""
    selector = f"involvedObject.name={pod},reason={reason}"
    wait_until(
        lambda: kubectl("-n", DEMO, "get", "events", "--field-selector", selector, "-o", "name"),
        f"event {reason} on {pod}",
    )


def wait_until(look: object, what: str, timeout_s: float = 90) -> None:
    """Ask again every quarter second until the answer is not empty."""
    assert callable(look)
    deadline = time.monotonic() + timeout_s
    while not str(look()).strip():
        if time.monotonic() > deadline:
            raise CommandFailed(f"{what}: not there after {timeout_s:.0f} s")
        time.sleep(0.25)


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
            demo.step(
                "A Kubernetes cluster on this machine", "Built and started the first time; seconds when it is there."
            )
            for module, arguments in (
                (images_program, ["build"]),
                (cluster_program, ["up"]),
                (cluster_program, ["load"]),
            ):
                subprocess.run(
                    [sys.executable, "-m", module.__name__.removesuffix(".__main__"), *arguments], check=True, cwd=ROOT
                )
        demo.run(Kubectl.local())
    except (CommandFailed, subprocess.CalledProcessError) as error:
        console.print(f"\nThe demo stopped: {error}", style="red", markup=False, highlight=False, soft_wrap=True)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""`make demo`: Tangram from nothing to pods that share a GPU, each step shown with the command that a user would type.

Brings up a local cluster (or takes the one in KUBECONFIG), installs the chart, and shows the cluster's own answers: what the demo
prints about pods and nodes is what kubectl printed. Every command that it runs is printed, and can be typed again in the root of
the tree.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import os
import shlex
import subprocess
import sys
import time
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.rule import Rule

from hack.kubectl import ROOT, CommandFailed, Kubectl
from hack.stack import NAMESPACE, NO_FAKE_DRIVER, install_chart, install_fake_driver
from hack.waiting import NotSoon, eventually

GPUS: Final = "gpu a100-80 count=2"
"""Two A100 of 80 GiB, as a configuration of the fake driver: what the sizes of the examples are for."""
UNITS: Final = 160
"""GiB that they offer together."""

SHARES: Final = "examples/01-shares"
PAST_THE_GRANT: Final = "examples/02-past-the-grant"
NO_SINGLE_GPU: Final = "examples/03-no-single-gpu"
TIME: Final = "examples/06-gpu-time"
FAKE_TIME: Final = "examples/fake-gpu/06-gpu-time"
"""On the fake driver each pod needs its kernel side, too."""
SHARERS: Final = ("chat", "embed", "notebook")
WORKERS: Final = ("steady", "bulk", "live")
DEMO: Final = "tangram-demo"
IN_ARBITER: Final = ("-n", NAMESPACE, "exec", "ds/tangram-node", "-c", "arbiter", "--")

REAL_GPU_VALUES: Final = {"driver": {"root": "/"}, "node": {"privileged": "auto", **NO_FAKE_DRIVER}}
POD_COLUMNS: Final = (
    "custom-columns=POD:.metadata.name,GPU:.metadata.annotations.tangram\\.sh/gpus\\.main,STATUS:.status.phase"
)
WHY_COLUMNS: Final = "custom-columns=POD:.metadata.name,STATUS:.status.phase,WHY:.status.conditions[0].message"


class Demo:
    """The steps, and how they are shown."""

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

    def report(self, command: str) -> None:
        """What is run, as a person would type it."""
        self.console.print(f"$ {command}", style="cyan", highlight=False, markup=False, soft_wrap=True)

    def print(self, text: str) -> None:
        """What a command printed."""
        self.console.print(text.rstrip("\n"), highlight=False, markup=False, soft_wrap=True)

    def on_node(self, kubectl: Kubectl, command: str, pods: tuple[str, ...]) -> None:
        """tangramctl's output on these pods in the arbiter's container: the rows of a table, cut at the console's width, and sentences, shown whole."""
        pick = shlex.quote("|".join(["RUN", *pods]))
        for line in kubectl.shell(
            f"kubectl {shlex.join(IN_ARBITER)} tangramctl {command} | grep -E {pick}"
        ).splitlines():
            if "  " in line:  # between two columns
                self.console.print(line.rstrip(), highlight=False, markup=False, no_wrap=True, overflow="ellipsis")
            else:
                self.print(line)

    def show(self, kubectl: Kubectl, *arguments: str, only: tuple[str, ...] = (), but: str = "") -> None:
        """Run kubectl and print its output; `only` keeps the lines that match one of these, `but` leaves out those with it."""
        if not only and not but:
            self.print(kubectl(*arguments))
            return
        pick = f"grep -E {shlex.quote('|'.join(only))}" if only else f"grep -v {shlex.quote(but)}"
        self.print(kubectl.shell(f"{shlex.join(['kubectl', *arguments])} | {pick}"))

    def in_demo(self, kubectl: Kubectl, *arguments: str) -> None:
        """`show` in the demo's namespace."""
        self.show(kubectl, "-n", DEMO, *arguments)

    def cluster(self) -> None:
        """Images and a cluster of our own."""
        self.step(
            "A Kubernetes cluster on this machine",
            "The first time its programs and images are built, which takes some minutes; seconds when they are there.",
        )
        for program in (["hack.prepare"], ["hack.cluster", "up"], ["hack.cluster", "load"]):
            self.report(f"uv run python -m {' '.join(program)}")
            # the paths that it prints are for programs; what a person wants to see is on standard error
            subprocess.run([sys.executable, "-m", *program], check=True, cwd=ROOT, stdout=subprocess.DEVNULL)

    def install(self, kubectl: Kubectl) -> str:
        """Driver if need be, and the chart. Returns the name of the node that offers GPUs."""
        self.step(
            "Install Tangram",
            "One chart: device plugin and arbiter on each GPU node, scheduler with extender, webhook.",
        )
        self.report(f"export KUBECONFIG={kubectl.kubeconfig} PATH={kubectl.path.partition(':')[0]}:$PATH")
        real = real_gpus_here()
        if not real:
            self.console.print(
                "No GPU here: a fake driver simulates two A100 of 80 GiB (real libcuda and NVML interfaces; memory is only counted)."
            )
            install_fake_driver(kubectl, GPUS)
        install_chart(kubectl, REAL_GPU_VALUES if real else None)
        # those that an upgrade has just replaced show nothing about what is installed
        self.show(kubectl, "-n", NAMESPACE, "get", "pods", but="Terminating")
        units = "" if real else f"={UNITS}"
        offered = f"--for=jsonpath={{.status.allocatable.tangram\\.sh/gpu-mem}}{units}"
        kubectl("wait", "node", "--all", offered, "--timeout=120s")

        self.step("What the node offers", "gpu-mem counts GiB, gpu-core percent of a GPU's time, gpu whole GPUs.")
        node = kubectl("get", "nodes", "-o", "name").split()[0]
        self.show(kubectl, "describe", node, only=("Capacity:", "Allocatable:", "tangram.sh/gpu.*:"))
        return node

    def share(self, kubectl: Kubectl, node: str) -> None:
        """Three pods on one GPU, and what each sees of it."""
        self.step("Three pods request shares of one GPU", "A plain pod spec: two lines under limits, nothing else.")
        fresh_namespace(kubectl)
        self.print(kubectl.shell(f"cat {SHARES}/pods.yaml"))
        self.in_demo(kubectl, "apply", "-k", SHARES)
        kubectl("-n", DEMO, "wait", "--for=condition=Ready", "pod", "--all", "--timeout=120s")
        self.in_demo(kubectl, "get", "pods", "-o", POD_COLUMNS)

        self.step(
            "Each sees its own share, as CUDA and nvidia-smi show it",
            "chat requested 8 GiB and allocated 6. nvidia-smi also counts its CUDA context (about half a GiB), the context room for code that "
            "is loaded later (0.2) and memory leased ahead (0.25), which the process may still use.",
        )
        self.in_demo(kubectl, "logs", "chat")
        self.in_demo(kubectl, "exec", "chat", "--", "nvidia-smi")
        self.console.print(
            "Read from a second process, which has a context and context room of its own (0.6 to 0.7 GiB):",
            style="dim",
        )
        for pod in ("embed", "notebook"):
            self.in_demo(kubectl, "exec", pod, "--", "gpuview")

        self.step("The node's records")
        self.show(kubectl, "describe", node, only=("Allocated resources:", "  Resource ", "tangram.sh/gpu[^:]*$"))
        self.on_node(kubectl, "ps", SHARERS)

    def refuse(self, kubectl: Kubectl) -> None:
        """A pod that exceeds its grant."""
        self.step(
            "A pod that allocates more than its grant",
            "It gets CUDA_ERROR_OUT_OF_MEMORY at its own limit, which includes its CUDA context. Its neighbours continue.",
        )
        self.in_demo(kubectl, "apply", "-k", PAST_THE_GRANT)
        kubectl("-n", DEMO, "wait", "--for=jsonpath={.status.phase}=Failed", "pod/greedy", "--timeout=120s")
        self.in_demo(kubectl, "logs", "greedy")
        self.in_demo(kubectl, "logs", "chat", "--tail=1")
        self.in_demo(kubectl, "get", "pods")

    def wait_for_room(self, kubectl: Kubectl) -> None:
        """What fits the node's total and no GPU."""
        self.step(
            "A pod that fits on no single GPU",
            "train takes 60 GiB of the other GPU, and validate requests 50. The node has 60 GiB free: 40 on one GPU and 20 on the other. An Event gives the reason. "
            "The pod starts when one GPU has enough free memory.",
        )
        self.in_demo(kubectl, "apply", "-k", NO_SINGLE_GPU)
        kubectl("-n", DEMO, "wait", "--for=condition=Ready", "pod/train", "--timeout=120s")
        kubectl("-n", DEMO, "wait", "--for=condition=PodScheduled=False", "pod/validate", "--timeout=120s")
        self.in_demo(kubectl, "get", "pod", "validate", "-o", WHY_COLUMNS)
        self.in_demo(kubectl, "delete", "pod", "train")
        kubectl("-n", DEMO, "wait", "--for=condition=Ready", "pod/validate", "--timeout=120s")
        self.in_demo(kubectl, "get", "pods", "-o", POD_COLUMNS)

    def share_time(self, kubectl: Kubectl) -> None:
        """Three pods that compute on one GPU, and what each gets of its time."""
        self.step(
            "GPU time: 30 % and 60 % side by side, and short work that comes first",
            "steady and bulk always have a next kernel of 20 ms. live is latency-critical: a kernel of 2 ms, ten times a second.",
        )
        self.in_demo(kubectl, "delete", "pod", "--all")
        self.in_demo(kubectl, "apply", "-k", TIME if real_gpus_here() else FAKE_TIME)
        kubectl("-n", DEMO, "wait", "--for=condition=Ready", "pod", *WORKERS, "--timeout=120s")
        # the first report has the start in it
        for pod in WORKERS:
            eventually(functools.partial(has_logged, kubectl, pod, 2), f"pod {pod} computes")
        self.on_node(kubectl, "top --once", WORKERS)
        for pod in WORKERS:
            self.in_demo(kubectl, "logs", pod, "--tail=1")
        self.console.print(
            "GOT is the part of the last second in which a container had work queued and was allowed to run. When live needs the GPU, the arbiter suspends the others in the middle of their kernels.",
            style="dim",
            highlight=False,
        )

    def end(self, kubectl: Kubectl) -> None:
        """Where to go from here."""
        self.step("Done")
        self.console.print(
            f"The cluster stays up. Look around:\n\n"
            f"    export KUBECONFIG={kubectl.kubeconfig} PATH={kubectl.path.partition(':')[0]}:$PATH\n"
            f"    kubectl -n {DEMO} get pods\n"
            f"    kubectl {shlex.join(IN_ARBITER)} tangramctl top --once\n"
            "    .venv/bin/tangramctl --help    # the same shares without a cluster: examples/04-no-cluster\n\n"
            + ("" if real_gpus_here() else ON_THE_FAKE_DRIVER)
            + "Clean up:\n\n    make cluster-down     # stops everything and leaves nothing behind but the build cache",
            highlight=False,
            soft_wrap=True,
        )


ON_THE_FAKE_DRIVER: Final = (
    "On this fake driver the memory limit of your own pods is enforced. Their gpu-core is enforced if they preload the fake kernel driver, as\n"
    f"the pods of {FAKE_TIME} do.\n\n"
)


def real_gpus_here() -> bool:
    """Is there an NVIDIA driver on this machine?"""
    return Path("/dev/nvidiactl").exists() and Path("/proc/driver/nvidia").exists()


def has_logged(kubectl: Kubectl, pod: str, lines: int) -> bool:
    """Has a pod of the demo logged so many lines?"""
    quiet = dataclasses.replace(kubectl, report=lambda _command: None)
    return len(quiet("-n", DEMO, "logs", pod).splitlines()) >= lines


def clear_away(kubectl: Kubectl) -> None:
    """Return when nothing of an earlier run is left."""
    kubectl("delete", "namespace", DEMO, "--ignore-not-found", "--wait", "--timeout=120s")


def fresh_namespace(kubectl: Kubectl) -> None:
    """The demo's namespace, without what an earlier run left."""
    clear_away(kubectl)
    kubectl("create", "namespace", DEMO)
    kubectl("-n", DEMO, "wait", "--for=create", "serviceaccount/default", "--timeout=60s")


def run(demo: Demo) -> None:
    """All steps."""
    if "KUBECONFIG" not in os.environ:
        demo.cluster()
    kubectl = dataclasses.replace(Kubectl.local(), report=demo.report)
    node = demo.install(kubectl)
    demo.share(kubectl, node)
    demo.refuse(kubectl)
    if not real_gpus_here():  # the sizes are those of the two GPUs that the fake driver simulates
        demo.wait_for_room(kubectl)
    demo.share_time(kubectl)
    demo.end(kubectl)


def main() -> int:
    """Bring up the cluster if none is named, then run the steps."""
    parser = argparse.ArgumentParser(
        prog="make demo", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.parse_args()
    console = Console(width=None if sys.stdout.isatty() else 120)
    try:
        run(Demo(console))
    except (CommandFailed, NotSoon, subprocess.CalledProcessError) as error:
        console.print(f"\nThe demo stopped: {error}", style="red", markup=False, highlight=False, soft_wrap=True)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

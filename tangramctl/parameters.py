"""The options of `tangramctl run` and `simulate`, as types of their parameters: the name, value and help text of each."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, NoReturn, TypeVar

import typer

from tangramctl.completion import SHELLS
from tangramctl.errors import BadOption

_Number = TypeVar("_Number", int, float)


def whole(option: str, least: int, most: int) -> Callable[[str], int]:
    """Reads a whole number. What is none, or out of range, is named with the range."""
    return _reader(int, f"{option} is {{}}: it must be a whole number, {least} to {most}", least, most)


def number(option: str, least: float, most: float) -> Callable[[str], float]:
    """Reads a number, as `whole` does."""
    return _reader(float, f"{option} is {{}}: it must be a number, {least:g} to {most:g}", least, most)


def _reader(kind: type[_Number], sentence: str, least: _Number, most: _Number) -> Callable[[str], _Number]:
    def read(text: str) -> _Number:
        try:
            found = kind(text)
        except ValueError:
            _refuse(sentence.format(repr(text)))
        if not least <= found <= most:
            _refuse(sentence.format(text))
        return found

    return read


def _refuse(sentence: str) -> NoReturn:
    print(f"tangramctl: {sentence}", file=sys.stderr)
    raise typer.Exit(BadOption.code)


def _among(*values: str) -> Callable[[str], list[str]]:
    """Completes a word to those of the values that begin with it."""

    def complete(incomplete: str) -> list[str]:
        return [value for value in values if value.startswith(incomplete)]

    return complete


def _shell(text: str) -> str:
    if text not in SHELLS:
        _refuse(f"SHELL is {text!r}: it must be {', '.join(SHELLS[:-1])} or {SHELLS[-1]}")
    return text


Shell = Annotated[
    str,
    typer.Argument(
        metavar="SHELL",
        help=f"{', '.join(SHELLS[:-1])} or {SHELLS[-1]}.",
        parser=_shell,
        autocompletion=_among(*SHELLS),
    ),
]
Command = Annotated[list[str], typer.Argument(metavar="COMMAND", help="The command and its arguments, after --.")]
GpuMem = Annotated[
    str,
    typer.Option("--gpu-mem", metavar="SIZE", help="GPU memory: 8Gi, 512Mi; a plain number is GiB. CUDA's own is inside."),
]  # fmt: skip
GpuMemBurst = Annotated[
    str | None,
    typer.Option(
        "--gpu-mem-burst",
        metavar="SIZE",
        help="GPU memory in all, while others leave it idle: as --gpu-mem, or max.",
    ),
]
HostPool = Annotated[
    str | None,
    typer.Option(
        "--host-pool",
        metavar="SIZE",
        help="Host memory for what is moved off a GPU, if this is its first run with --gpu-mem-burst.",
    ),
]
GpuCore = Annotated[
    int,
    typer.Option(
        "--gpu-core",
        metavar="PERCENT",
        parser=whole("--gpu-core", 0, 100),
        help="GPU time, percent of one GPU. 0: no cap.",
    ),
]
Class = Annotated[
    str,
    typer.Option(
        "--class", metavar="CLASS", help="latency-critical, standard or best-effort.",
        autocompletion=_among("latency-critical", "standard", "best-effort"),
    ),
]  # fmt: skip
Level = Annotated[
    int,
    typer.Option(
        "--level", metavar="N", parser=whole("--level", 0, 4), help="Order inside the class, 0 first, 0 to 4."
    ),
]
Gpu = Annotated[
    str | None,
    typer.Option(
        "--gpu",
        metavar="GPU",
        help="Index or UUID, or several by comma: one of these. Default: of $CUDA_VISIBLE_DEVICES, else any.",
    ),
]
Wait = Annotated[bool, typer.Option("--wait", help="Wait until a GPU has enough free memory.")]
Clear = Annotated[
    bool,
    typer.Option("--clear", help="Zero memory before the command gets it, so that it cannot read what others left."),
]
Fake = Annotated[
    Path | None,
    typer.Option("--fake", metavar="FILE", help="Pretend to have the GPUs that FILE describes, one a line: gpu t4"),
]
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Print on stderr which GPU was chosen.")]
Library = Annotated[
    Path | None,
    typer.Option(
        "--library",
        envvar="TANGRAMCTL_LIBRARY",
        metavar="FILE",
        help="libtangram.so. Default: build/shim, packaged, /opt/tangram/lib.",
    ),
]
IdleS = Annotated[
    float,
    typer.Option(
        "--idle-s",
        envvar="TANGRAMCTL_IDLE_S",
        metavar="SECONDS",
        parser=number("--idle-s", 0, 86400),
        help="How long an arbiter started now stays after the last run.",
    ),
]
SimulatedNodes = Annotated[Path | None, typer.Option("--nodes", metavar="FILE", help="CSV of the nodes.")]
SimulatedPods = Annotated[Path | None, typer.Option("--pods", metavar="FILE", help="CSV of the pods.")]
Policy = Annotated[
    str,
    typer.Option(
        "--policy", metavar="NAME", help="binpack, spread, fragmentation, topology or scheduler.",
        autocompletion=_among("binpack", "spread", "fragmentation", "topology", "scheduler"),
    ),
]  # fmt: skip
Seeds = Annotated[str, typer.Option("--seeds", metavar="FIRST:END", help="Orders of arrival to try, END not included.")]
Arrive = Annotated[float, typer.Option("--arrive", metavar="TIMES", help="How much arrives, times the capacity.")]
Jobs = Annotated[
    int, typer.Option("--jobs", metavar="N", parser=whole("--jobs", 1, 64), help="Seeds replayed at once.")
]
Plot = Annotated[Path | None, typer.Option("--plot", metavar="FILE.svg", help="Draw the curve.")]
SnapshotFile = Annotated[
    Path | None, typer.Option("--snapshot", metavar="FILE", help="What the extender's GET /snapshot answered.")
]
PodGpuMem = Annotated[
    str | None, typer.Option("--gpu-mem", metavar="SIZE", help="With --snapshot: memory on each GPU.")
]
PodGpuCore = Annotated[
    int,
    typer.Option(
        "--gpu-core",
        metavar="PERCENT",
        parser=whole("--gpu-core", 0, 100),
        help="With --snapshot: of each GPU.",
    ),
]
PodGpuCount = Annotated[int, typer.Option("--gpu-count", metavar="N", help="With --snapshot: GPUs.")]
PodGpuModel = Annotated[
    str, typer.Option("--gpu-model", metavar="MODELS", help="With --snapshot: models allowed, by comma.")
]
MigFile = Annotated[
    Path, typer.Option("--file", "-f", metavar="FILE", help="Layouts, in the format of NVIDIA's mig-parted.")
]
MigConfig = Annotated[str, typer.Option("--config", "-c", metavar="NAME", help="The layout of the file that is meant.")]
DriverRoot = Annotated[
    Path, typer.Option("--driver-root", metavar="DIR", help="Folder below which the driver's libraries are.")
]
KubeletCheckpoint = Annotated[
    Path | None,
    typer.Option(
        "--kubelet-checkpoint", metavar="FILE",
        help="The kubelet's record of devices. Default /var/lib/kubelet/device-plugins/kubelet_internal_checkpoint; none there: no pods.",
    ),
]  # fmt: skip
NodeName = Annotated[str, typer.Argument(metavar="NODE", help="The node's name.")]
NodeGpu = Annotated[
    str,
    typer.Argument(metavar="GPU", help="Index, UUID, or the beginning of a UUID that no other GPU of the node has."),
]
Domain = Annotated[str, typer.Option("--domain", metavar="DOMAIN", help="Of resources and annotations.")]

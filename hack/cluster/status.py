"""Print what runs and how to use it."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from hack.cluster import control_plane, node, processes
from hack.cluster.console import Steps
from hack.cluster.layout import Layout


def shell_lines(layout: Layout) -> str:
    """Lines for `eval` in a shell."""
    return f'export KUBECONFIG="{layout.kubeconfig}"\nexport PATH="{layout.bin}:$PATH"'


def say_ready(layout: Layout, steps: Steps) -> None:
    logs = f" Logs are in {layout.logs}." if layout.logs.is_dir() else ""
    steps.print(f"The cluster is up ({steps.elapsed_s:.0f} s).{logs} To use it:")
    steps.print("\n".join(f"    {line}" for line in shell_lines(layout).splitlines()))
    steps.print("    kubectl get nodes")


def program_names(layout: Layout) -> list[str]:
    """Every program that should run, in the order of starting."""
    nodes = [each.process(program) for each in layout.nodes() for program in reversed(node.PROGRAMS)]
    return [*control_plane.NAMES, *nodes]


def show(layout: Layout, steps: Steps) -> int:
    """Print a table; 0 when everything runs, 3 when something does not or nothing is there."""
    if not layout.provider.exists():
        steps.print(f"no cluster in {layout.state}")
        return 3
    provider = layout.provider.read_text().strip()
    if provider != "local":
        steps.print(f"the cluster is {provider}'s; kubeconfig {layout.kubeconfig}")
        return 0
    table = Table("program", "pid", "log", box=None)
    pids = {name: processes.pid_of(layout, name) for name in program_names(layout)}
    for name, pid in pids.items():
        table.add_row(name, "[red]not running[/]" if pid is None else str(pid), str(processes.log_path(layout, name)))
    Console().print(table)
    return 3 if None in pids.values() else 0

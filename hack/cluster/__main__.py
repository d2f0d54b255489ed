"""The command line: `python -m hack.cluster up|down|status|logs|load|kubeconfig|env|restart|align|shell|build`."""

from __future__ import annotations

import argparse
import fcntl
import os
import shlex
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hack.cluster import node, numa, processes, programs, providers, status
from hack.cluster.build import build
from hack.cluster.caller import become_root
from hack.cluster.console import Steps
from hack.cluster.layout import STATE, Layout, cache_folder

LOCK = Path("/run/lock/tangram-cluster.lock")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m hack.cluster", description="A real Kubernetes on this machine.")
    parser.add_argument("--state", type=Path, default=STATE, help="state folder (default %(default)s)")
    commands = parser.add_subparsers(dest="command", required=True)
    up = commands.add_parser("up", help="start the cluster, or what is missing of it")
    up.add_argument("--nodes", type=int, default=1, help="number of nodes (default %(default)s)")
    up.add_argument("--provider", choices=providers.NAMES, help="default: kind where Docker answers, else local")
    up.add_argument("--replace", action="store_true", help="take a cluster of another provider down first")
    down = commands.add_parser("down", help="stop everything and leave nothing behind")
    down.add_argument("--quiet", action="store_true", help="print nothing unless it fails")
    commands.add_parser("status", help="what runs, with pids, logs and nodes")
    logs = commands.add_parser("logs", help="print the end of one log, or list the logs")
    logs.add_argument("name", nargs="?")
    logs.add_argument("--lines", type=int, default=200)
    compile_only = commands.add_parser(
        "build", help="build programs without starting anything, and print where they are"
    )
    names = [module.name for module in programs.ALL]
    compile_only.add_argument(
        "modules", nargs="*", metavar="MODULE", help=f"some of {', '.join(names)} (default: what `up` needs)"
    )
    compile_only.add_argument("--quiet", action="store_true", help="print nothing unless it fails")
    load = commands.add_parser("load", help="bring image archives into every node")
    load.add_argument("archives", nargs="*", type=Path, metavar="IMAGE.tar", help="default: the images built last")
    commands.add_parser("kubeconfig", help="print the path of the kubeconfig")
    commands.add_parser("env", help="print what to eval in a shell")
    restart = commands.add_parser("restart", help="end one program and start it again, pods stay")
    restart.add_argument("program", choices=["kubelet", "containerd"])
    restart.add_argument("--node", default="node1")
    align = commands.add_parser("align", help="restart a kubelet with two NUMA nodes and a policy of TopologyManager")
    align.add_argument("policy", choices=numa.POLICIES)
    align.add_argument("--node", default="node1")
    shell = commands.add_parser("shell", help="run a command where a node's own folders are seen")
    shell.add_argument("--node", default="node1")
    shell.add_argument("argv", nargs=argparse.REMAINDER, metavar="COMMAND")
    return parser


@contextmanager
def _alone() -> Iterator[None]:
    """One that changes the cluster at a time; a second one waits."""
    LOCK.parent.mkdir(parents=True, exist_ok=True)
    with LOCK.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _logs(layout: Layout, name: str | None, lines: int) -> None:
    if name is None:
        for path in sorted(layout.logs.glob("*.log")):
            print(path)
        return
    path = processes.log_path(layout, name)
    if not path.exists():
        known = ", ".join(sorted(p.stem for p in layout.logs.glob("*.log"))) or "none"
        raise LookupError(f"log {name!r}: the logs are {known}")
    print("\n".join(path.read_text(errors="replace").splitlines()[-lines:]))


def _build(names: list[str], steps: Steps) -> None:
    known = {module.name: module for module in programs.ALL}
    unknown = set(names) - set(known)
    if unknown:
        raise LookupError(f"modules {', '.join(sorted(unknown))}: there are {', '.join(known)}")
    for path in build(cache_folder(), [known[name] for name in names] or programs.CLUSTER, steps).values():
        print(path)


def _restart(layout: Layout, program: str, name: str, steps: Steps) -> None:
    target = layout.node_named(name)
    with steps.step(f"restart {program} of {name}"):
        processes.stop(layout, target.process(program))
        node.start_runtime(target)
        node.start_kubelet(target)


def _shell(layout: Layout, name: str, argv: list[str]) -> None:
    command = node.inside(layout.node_named(name), (argv[1:] if argv[:1] == ["--"] else argv) or ["bash"])
    os.execvp(command[0], command)


def _run(arguments: argparse.Namespace, layout: Layout, steps: Steps) -> None:
    match arguments.command:
        case "up":
            providers.up(layout, arguments.provider, arguments.nodes, steps, replace=arguments.replace)
        case "down":
            providers.down(layout, steps)
        case "load":
            providers.load(layout, arguments.archives, steps)
        case "align":
            with steps.step(f"restart the kubelet of {arguments.node} with policy {arguments.policy}"):
                node.align(layout.node_named(arguments.node), arguments.policy)
        case "restart":
            _restart(layout, arguments.program, arguments.node, steps)


def main() -> int:
    arguments = _parser().parse_args()
    layout = Layout(arguments.state.resolve())
    steps = Steps(quiet=getattr(arguments, "quiet", False))
    try:
        match arguments.command:
            case "kubeconfig":
                print(providers.kubeconfig(layout))
            case "env":
                print(status.shell_lines(layout))
            case "build":
                _build(arguments.modules, steps)
            case "logs":
                _logs(layout, arguments.name, arguments.lines)
            case "status":
                return status.show(layout, steps)
            case "shell":
                become_root("hack.cluster")
                _shell(layout, arguments.node, arguments.argv)
            case _:
                become_root("hack.cluster")
                with _alone():
                    _run(arguments, layout, steps)
    except (LookupError, OSError, RuntimeError, ValueError, subprocess.TimeoutExpired) as error:
        print(f"{arguments.command}: {error}", file=sys.stderr)
        return 1
    except subprocess.CalledProcessError as error:
        words = error.stderr.decode(errors="replace") if isinstance(error.stderr, bytes) else error.stderr or ""
        output = f": {words.strip()}" if words.strip() else ""
        print(
            f"{arguments.command}: {shlex.join(map(str, error.cmd))} ended with {error.returncode}{output}",
            file=sys.stderr,
        )
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

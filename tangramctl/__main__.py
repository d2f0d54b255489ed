"""tangramctl: the command line. What a command needs is imported when it is called: help answers at once."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from tangramctl import help_texts, parameters
from tangramctl.answering import answering, open_standard
from tangramctl.completion import WIDE, completing
from tangramctl.proc import called_by_kubectl

app = typer.Typer(
    name="tangramctl",
    help=help_texts.ABOUT,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # rich help costs 250 ms and breaks the examples
    context_settings={"help_option_names": ["-h", "--help"]},
)
arbiter_app = typer.Typer(
    help="The arbiter behind the runs: it starts with the first run and ends by itself a minute after the last.",
    no_args_is_help=True,
)
app.add_typer(arbiter_app, name="arbiter")
explain_app = typer.Typer(help="Explain the state of a cluster.", no_args_is_help=True)
app.add_typer(explain_app, name="explain")

mig_app = typer.Typer(help=help_texts.MIG, no_args_is_help=True, rich_markup_mode=None)
app.add_typer(mig_app, name="mig")

State = Annotated[
    Path | None,
    typer.Option(
        "--state",
        envvar="TANGRAMCTL_STATE",
        metavar="DIR",
        help="State folder: one record of runs and one arbiter each. Default /run/tangramctl for root, else $XDG_RUNTIME_DIR/tangramctl.",
    ),
]


def _version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        print(f"tangramctl {version('tangram')}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """What stands before the command."""


@app.command(help=help_texts.RUN, context_settings={"allow_interspersed_args": False})
def run(
    command: parameters.Command,
    gpu_mem: parameters.GpuMem,
    gpu_mem_burst: parameters.GpuMemBurst = None,
    host_pool: parameters.HostPool = None,
    gpu_core: parameters.GpuCore = 0,
    service_class: parameters.Class = "standard",
    level: parameters.Level = 2,
    gpu: parameters.Gpu = None,
    wait: parameters.Wait = False,
    clear: parameters.Clear = False,
    fake: parameters.Fake = None,
    verbose: parameters.Verbose = False,
    library: parameters.Library = None,
    idle_s: parameters.IdleS = 60.0,
    state: State = None,
) -> None:
    """See help_texts.RUN."""
    from tangramctl.machine import default_root
    from tangramctl.run import Options
    from tangramctl.run import run as start

    options = Options(
        gpu_mem=gpu_mem, gpu_mem_burst=gpu_mem_burst, host_pool=host_pool, gpu_core=gpu_core, service_class=service_class, level=level, gpu=gpu, wait=wait, clear=clear, verbose=verbose,
        fake=fake, library=library, state=state or default_root(), idle_s=idle_s, command=tuple(command),
    )  # fmt: skip
    with answering(f"state folder {options.state}"):
        start(options)


@app.command(help=help_texts.PS)
def ps(
    json: Annotated[bool, typer.Option("--json", help="A document for programs.")] = False,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Show again every second until stopped.")] = False,
    state: State = None,
) -> None:
    """See help_texts.PS."""
    from tangramctl.ps import ps as show

    with answering():
        show(state, json=json, watch=watch)


@app.command(help=help_texts.SIMULATE)
def simulate(
    context: typer.Context,
    nodes: parameters.SimulatedNodes = None,
    pods: parameters.SimulatedPods = None,
    policy: parameters.Policy = "binpack",
    seeds: parameters.Seeds = "42:52",
    arrive: parameters.Arrive = 1.3,
    jobs: parameters.Jobs = 1,
    plot: parameters.Plot = None,
    snapshot: parameters.SnapshotFile = None,
    gpu_mem: parameters.PodGpuMem = None,
    gpu_core: parameters.PodGpuCore = 0,
    gpu_count: parameters.PodGpuCount = 1,
    gpu_model: parameters.PodGpuModel = "",
    json: Annotated[bool, typer.Option("--json", help="A document for programs.")] = False,
) -> None:
    """See help_texts.SIMULATE."""
    from tangramctl.errors import BadOption
    from tangramctl.simulate import simulate as replay
    from tangramctl.simulate import would_fit

    with answering():
        of_replay = _given(context, "nodes", "pods", "seeds", "arrive", "jobs", "plot")
        of_pod = _given(context, "gpu_mem", "gpu_core", "gpu_count", "gpu_model")
        if snapshot is not None:
            if of_replay:
                raise BadOption(
                    f"--snapshot cannot stand with {', '.join(of_replay)}: a snapshot is for one pod, and nothing is replayed"
                )
            if gpu_mem is None:
                raise BadOption("--snapshot needs --gpu-mem")
            fits = would_fit(
                snapshot,
                policy=policy,
                gpu_mem=gpu_mem,
                gpu_core=gpu_core,
                gpus=gpu_count,
                models=gpu_model,
                json=json,
            )
            raise typer.Exit(0 if fits else 3)
        if nodes is None or pods is None:
            raise BadOption("simulate needs --nodes and --pods, or --snapshot and --gpu-mem")
        if of_pod:
            raise BadOption(
                f"--nodes and --pods cannot stand with {', '.join(of_pod)}: what pods request is in the file of --pods"
            )
        replay(nodes, pods, policy=policy, seeds=seeds, arrive=arrive, json=json, plot=plot, jobs=jobs)


@app.command(help=help_texts.TOP)
def top(
    json: Annotated[bool, typer.Option("--json", help="A document a line, for programs.")] = False,
    once: Annotated[bool, typer.Option("--once", help="One second, and end.")] = False,
    state: State = None,
) -> None:
    """See help_texts.TOP."""
    from tangramctl.top import top as show

    with answering():
        show(state, json=json, once=once)


@explain_app.command(name="pod", help=help_texts.EXPLAIN)
def explain_pod(
    pod: Annotated[str, typer.Argument(metavar="NAMESPACE/NAME", help="The pod.")],
    snapshot: Annotated[
        Path | None, typer.Option("--snapshot", metavar="FILE", help="What the extender's GET /snapshot answered.")
    ] = None,
    extender: Annotated[
        str, typer.Option("--extender", metavar="URL", help="Where the extender is.")
    ] = "http://127.0.0.1:8888",
    spec: Annotated[
        Path | None, typer.Option("--pod", metavar="FILE", help="The pod, as kubectl get pod -o json writes it.")
    ] = None,
    domain: Annotated[
        str, typer.Option("--domain", metavar="DOMAIN", help="Of resources and annotations, where the API is read.")
    ] = "tangram.sh",
    json: Annotated[bool, typer.Option("--json", help="A document for programs.")] = False,
) -> None:
    """See help_texts.EXPLAIN."""
    from tangramctl.explain import explain_pod as explain

    with answering():
        fits = explain(pod, pod=spec, snapshot=snapshot, extender=extender, domain=domain, json=json)
        raise typer.Exit(0 if fits else 3)


@app.command(help=help_texts.CORDON)
def cordon(
    node: parameters.NodeName, gpu: parameters.NodeGpu,
    drain: Annotated[bool, typer.Option("--drain", help="Evict the pods that have it, and wait.")] = False,
    reason: Annotated[str, typer.Option("--reason", metavar="TEXT", help="For people; one line.")] = "",
    timeout_s: Annotated[
        float,
        typer.Option(
            "--timeout-s", metavar="SECONDS", parser=parameters.number("--timeout-s", 0, 604800),
            help="With --drain: give up after so long. 0: never.",
        ),
    ] = 0.0,
    domain: parameters.Domain = "tangram.sh",
) -> None:  # fmt: skip
    """See help_texts.CORDON."""
    from tangramctl import cordon as cordons
    from tangramctl.drain import Drain
    from vgpu.api.names import Names

    with answering():
        uuid = cordons.cordon(node, gpu, reason, Names(domain))
        if drain:
            Drain(node, uuid, Names(domain), timeout_s).run()


@app.command(
    help="Let pods on a GPU of a cluster's node again, once it has passed its self-test. See tangramctl cordon."
)
def uncordon(node: parameters.NodeName, gpu: parameters.NodeGpu, domain: parameters.Domain = "tangram.sh") -> None:
    """See help_texts.CORDON."""
    from tangramctl import cordon as cordons
    from vgpu.api.names import Names

    with answering():
        cordons.uncordon(node, gpu, Names(domain))


@app.command(help=help_texts.GPUS)
def gpus(node: parameters.NodeName, domain: parameters.Domain = "tangram.sh") -> None:
    """See help_texts.GPUS."""
    from tangramctl import cordon as cordons
    from vgpu.api.names import Names

    with answering():
        print("\n".join(cordons.lines(cordons.read(node, Names(domain)))))


@mig_app.command(name="plan", help="Print what apply would destroy and create.")
def mig_plan(
    file: parameters.MigFile, config: parameters.MigConfig, driver_root: parameters.DriverRoot = Path("/"),
    checkpoint: parameters.KubeletCheckpoint = None,
) -> None:  # fmt: skip
    """See help_texts.MIG."""
    from tangramctl.kubelet_devices import CHECKPOINT
    from tangramctl.mig import Where, show_plan

    with answering():
        show_plan(file, config, Where(driver_root, checkpoint or CHECKPOINT))


@mig_app.command(
    name="apply", help="Destroy and create instances until the layout is the file's: on every GPU, or on none."
)
def mig_apply(
    file: parameters.MigFile, config: parameters.MigConfig, driver_root: parameters.DriverRoot = Path("/"),
    checkpoint: parameters.KubeletCheckpoint = None,
) -> None:  # fmt: skip
    """See help_texts.MIG."""
    from tangramctl.kubelet_devices import CHECKPOINT
    from tangramctl.mig import Where, apply

    with answering():
        apply(file, config, Where(driver_root, checkpoint or CHECKPOINT))


@mig_app.command(name="assert", help="Compare the layout with the file's. Exit code 3 when it differs.")
def mig_assert(
    file: parameters.MigFile, config: parameters.MigConfig, driver_root: parameters.DriverRoot = Path("/"),
) -> None:  # fmt: skip
    """See help_texts.MIG."""
    from tangramctl import mig

    with answering():
        raise typer.Exit(0 if mig.check(file, config, mig.Where(driver_root)) else 3)


@mig_app.command(name="export", help="Print the layout that is there, as a file that apply reads.")
def mig_export(
    config: Annotated[str, typer.Option("--config", "-c", metavar="NAME", help="Name of the layout in the file.")] = "current",
    driver_root: parameters.DriverRoot = Path("/"),
) -> None:  # fmt: skip
    """See help_texts.MIG."""
    from tangramctl import mig

    with answering():
        mig.export(config, mig.Where(driver_root))


@arbiter_app.command(help="Print whether it runs. Exit code 3 when it does not.")
def status(state: State = None) -> None:
    """Of the state folder, and of each fake machine below it."""
    from tangramctl.ps import arbiter_status

    with answering():
        raise typer.Exit(0 if arbiter_status(state) else 3)


@arbiter_app.command(help="End it. Refused while runs live, which could then get no more memory: --force.")
def stop(
    force: Annotated[
        bool, typer.Option("--force", help="Also while runs live; the next run or ps starts it again.")
    ] = False,
    state: State = None,
) -> None:
    """Of the state folder, and of each fake machine below it."""
    from tangramctl.ps import arbiter_stop

    with answering():
        arbiter_stop(state, force=force)


@app.command(help=help_texts.COMPLETION)
def completion(shell: parameters.Shell) -> None:
    """See help_texts.COMPLETION."""
    from tangramctl.completion import script

    with answering():
        print(script(shell))


def _given(context: typer.Context, *names: str) -> list[str]:
    """Those of the options that stand on the command line, as they are written there."""
    sources = {name: context.get_parameter_source(name) for name in names}
    return [
        f"--{name.replace('_', '-')}" for name, source in sources.items() if source and source.name == "COMMANDLINE"
    ]


def main() -> None:
    """The console script, also as a kubectl plugin."""
    open_standard()
    if completing():
        os.environ["COLUMNS"] = WIDE
    with answering():  # also what is no command's: its help
        app(prog_name="kubectl tangram" if called_by_kubectl() else "tangramctl")


if __name__ == "__main__":
    main()

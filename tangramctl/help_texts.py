"""What each command's --help says."""

from __future__ import annotations

from typing import Final

ABOUT: Final = """Give a command a share of a GPU, on any Linux machine, and see which process has what.

\b
  tangramctl run --gpu-mem 8Gi -- python train.py
  tangramctl ps
  tangramctl top

No cluster is needed. On a node of a Tangram cluster, ps (as root) also shows the pods' containers.
"""

RUN: Final = """Run a command with a share of one GPU: it sees a GPU of the size requested, and cannot take more.

\b
  tangramctl run --gpu-mem 8Gi -- python train.py
  tangramctl run --gpu-mem 8Gi --gpu-core 30 --class best-effort -- python train.py
  tangramctl run --gpu-mem 20Gi --gpu 1 -- ./server     on GPU 1, and no other
  tangramctl run --gpu-mem 8Gi --wait -- ./nightly      when a GPU has enough free memory
  tangramctl run --gpu-mem 8Gi -- bash                  a shell; all that starts in it shares the 8 GiB
  tangramctl run --fake gpus.txt --gpu-mem 8Gi -- nvidia-smi     no GPU needed

Of the GPUs with enough free memory, the one with the least is chosen. The command replaces tangramctl: exit code, signals and terminal are its own.
Before it runs: 2 bad option, 69 no GPU, 70 Tangram is broken, 75 too little free memory, 126 and 127 as in a shell.
"""

PS: Final = """Show the runs of this user, and as root on a cluster's node its containers, with what they use.

\b
  tangramctl ps
  tangramctl ps --watch
  tangramctl ps --json | jq '.entries[] | select(.over)'

CORE is the part of the GPU's time that was requested, TIME what it had of it so far.
LIMIT is what was granted, LEASED what the processes may use without a request, USED what they allocated, CONTEXT what CUDA itself takes.
"""

SIMULATE: Final = """Replay a workload through Tangram's own placement, or check whether a pod would fit a cluster's snapshot.

\b
  tangramctl simulate --nodes nodes.csv --pods pods.csv
  tangramctl simulate --nodes nodes.csv --pods pods.csv --policy fragmentation --plot curve.svg
  tangramctl simulate --snapshot snapshot.json --gpu-mem 20Gi --gpu-core 30

No cluster and no GPU is needed. The files are described in docs/reference/simulate.md; those of the openb trace are read as they are.
Exit code 3: the pod does not fit the snapshot.
"""

EXPLAIN: Final = """Print why a pod is pending: of each node the nearest GPU, and what it lacks.

\b
  tangramctl explain pod default/train-0
  tangramctl explain pod default/train-0 --json | jq .why_not
  tangramctl explain pod default/train-0 --snapshot snapshot.json

The data come from the extender (kubectl -n tangram-system port-forward deploy/tangram-scheduler 8888); where none answers, from the API.
The pod itself is read by kubectl. Exit code 3: it fits no node; 2: bad option or file, no such pod, no answer of the API; 127: no kubectl.
"""

TOP: Final = """Show the GPU time of each run: a table of the last second, again each second until stopped.

\b
  tangramctl top
  tangramctl top --once --json | jq '.rows[] | select(.got_percent > 50)'

GOT is the part of the second in which it had work and might run, WAITED in which it had work and waited for others,
CAPPED in which it waited for its own cap, SUSPENDS how often it was suspended. Runs that share a GPU openly divide the time.
"""

MIG: Final = """Compare this machine's MIG instances with a file in the format of NVIDIA's mig-parted, and change them. Runs as root.

\b
  tangramctl mig plan --file mig.yaml --config balanced       what apply would destroy and create
  tangramctl mig apply --file mig.yaml --config balanced
  tangramctl mig assert --file mig.yaml --config balanced     exit code 3 when it differs
  tangramctl mig export > mig.yaml

An instance that a process or a pod uses is never touched: if it is in the way, nothing is changed.
Exit codes: 2 bad option or file, 69 no GPU, 70 a step failed, 75 refused.
"""

CORDON: Final = """Keep new pods off one GPU of a cluster's node. Pods that have it stay, unless it is drained.

\b
  tangramctl cordon node-1 3 --reason "ECC errors"
  tangramctl cordon node-1 GPU-8c9f --drain       evict its pods, and wait until nothing has it open
  tangramctl uncordon node-1 3

GPU is an index, a UUID, or the beginning of one that no other GPU of the node has. kubectl is called, with your rights: to patch nodes, and with
--drain to list pods and disruption budgets and to create pods/eviction. Disruption budgets are waited for. Ctrl-C ends the waiting; the GPU stays cordoned.
Exit codes: 2 bad option, no such node or GPU, or refused by the API server; 69 no pod has it, and it cannot be released alone; 75 not drained within --timeout-s; 127 no kubectl.
"""

GPUS: Final = """Print the GPUs of a cluster's node: health, cordon, and what is wrong with each."""

COMPLETION: Final = """Print a script that completes commands and options in a shell.

\b
  tangramctl completion bash > ~/.local/share/bash-completion/completions/tangramctl
  tangramctl completion zsh > "${fpath[1]}/_tangramctl"
  tangramctl completion fish > ~/.config/fish/completions/tangramctl.fish

For `kubectl tangram`, kubectl's own completion is enough: it calls kubectl_complete-tangram, which is installed beside tangramctl.
"""

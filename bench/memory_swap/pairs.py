"""Containers that do not fit on a GPU together: changes of places, pairs of jobs, a server whose memory is away, and what bursts cost without pressure.

    python3 bench/memory_swap/pairs.py OUT.csv [--only places,quanta,server,jobs,nvshare,uvm,idle,beside] [--repeat 3] [--budget 560] [--fake]

    places      two containers of 16 GB change places: the first changes and later ones, every cell checked in each turn
    quanta      the same two, both with work all the time
    server      requests to a server of 16 GB whose memory is away
    jobs        two jobs at once against one after the other, 20 and 80 GB each
    nvshare     the same for the pairs of published.py
    uvm         these pairs in unified memory, without any product
    idle        no pressure: steps and requests in a container that may burst, beside one that may not
    beside      no pressure: a server beside best-effort training

One GPU, root, gcc, host memory for a pool (--pool-gb). PyTorch for the rows that name it: TANGRAM_TEST_PYTHON names its Python. A run goes on where an earlier one
with the same CSV ended: nothing begins that would not end within --budget seconds, and what has its row `done` is not measured again. Each measurement has its baseline in the
same command. The spread of all repeats is printed at the end, and the arbiter's log and trace of decisions are beside the CSV. On the fake driver everything has the 64th part of its size.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
from bench.memory_swap import beside, changes, job_pairs, no_pressure, serving
from bench.memory_swap.figures import Figures
from bench.memory_swap.session import Session
from bench.memory_swap.swap_node import node

PARTS: dict[str, Callable[[Session], None]] = {
    "places": changes.places,
    "quanta": changes.quanta,
    "server": serving.run,
    "jobs": job_pairs.jobs,
    "nvshare": job_pairs.nvshare,
    "uvm": job_pairs.uvm,
    "idle": no_pressure.run,
    "beside": beside.run,
}
POOL_GB = {"jobs": 88, "uvm": 1, "idle": 20, "beside": 48}
"""For two jobs of 80 GB, half of them guaranteed. Without pressure none is used, but excess is leased only while the pool has room for it. Every other
part: two of 16 GB."""
USUAL_POOL_GB = 36
FAKE_POOL_MIB = 1024


def main() -> int:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="the CSV")
    parser.add_argument("--only", default=",".join(PARTS), help="parts, comma between")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--budget", type=float, default=560, help="seconds for all of the command")
    parser.add_argument("--pool-gb", type=int, default=0, help="size of the pool; 0 = what the parts need")
    parser.add_argument(
        "--setting", action="append", default=[], help="NAME=VALUE, as TANGRAM_ARBITER_NAME of the arbiter"
    )
    parser.add_argument("--fake", action="store_true", default=None, help="on the fake driver, though there is a GPU")
    arguments = parser.parse_args()
    requested = arguments.only.split(",")
    if unknown := set(requested) - set(PARTS):
        parser.error(f"--only names {', '.join(sorted(unknown))}: parts are {', '.join(PARTS)}")
    end_s = time.monotonic() + arguments.budget
    settings = dict(one.split("=", 1) for one in arguments.setting)
    pool_gb = arguments.pool_gb or max(POOL_GB.get(part, USUAL_POOL_GB) for part in requested)
    pool_mib = FAKE_POOL_MIB if arguments.fake else pool_gb * 1000**3 // 2**20
    with node(arguments.fake, pool_mib, settings) as here:
        figures = Figures(arguments.out, here.machine.describe())
        session = Session(here, figures, arguments.repeat, end_s)
        try:
            for part in requested:
                PARTS[part](session)
        finally:
            shutil.copy(here.machine.folder / "arbiter.log", arguments.out.with_suffix(".log"))
            if (trace := here.machine.folder / "swap/trace.jsonl").exists():
                shutil.copy(trace, arguments.out.with_suffix(".jsonl"))
    print("\n".join(figures.spread()), flush=True)
    return 1 if session.failed else 0


if __name__ == "__main__":
    sys.exit(main())

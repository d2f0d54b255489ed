"""Run every benchmark that needs no GPU, one after another: `make bench`, or `python -m bench [NAME ...]`.

A benchmark is a module `bench/<part>/__main__.py` that writes its CSV beside itself and prints what it found.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent


def main() -> int:
    """Run the named benchmarks, or all."""
    parts = sorted(path.parent.name for path in HERE.glob("*/__main__.py"))
    parser = argparse.ArgumentParser(
        prog="bench", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("part", nargs="*", choices=[[], *parts], help=f"one of {', '.join(parts)} (default: all)")
    chosen = parser.parse_args().part or parts
    for part in chosen:
        print(f"== {part}", flush=True)
        subprocess.run([sys.executable, "-m", f"bench.{part}"], check=True, cwd=HERE.parent)
    return 0


if __name__ == "__main__":
    sys.exit(main())

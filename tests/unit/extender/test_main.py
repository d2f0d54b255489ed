"""Memory that a call has used is there for the next one."""

from __future__ import annotations

import subprocess
import sys

FAULTS = """
import resource, sys
if sys.argv[1] == "keep":
    from extender import __main__ as program
    assert program.keep_heap()
def use():
    for size in (80_000, 160_000, 320_000, 500_000, 320_000, 160_000) * 2:
        kept.append(bytearray(size))
    kept.clear()
kept = []
for _ in range(20):
    use()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(100):
    use()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(how: str) -> int:
    answer = subprocess.run([sys.executable, "-c", FAULTS, how], capture_output=True, text=True, check=True)
    return int(answer.stdout)


def test_memory_used_again_and_again_is_not_taken_from_the_kernel_each_time() -> None:
    assert faults("keep") < 1_000 < faults("as it is")

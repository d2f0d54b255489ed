"""How many examples a property test tries, and whether they are the same ones each time.

`make test` tries the same examples at every run (profile `same`), so that main is red for a change and not for bad luck. `make fuzz` tries
others (profile `fuzz`): as many as EXAMPLES says, in the order of SEED, which it prints. What it finds becomes an `@example` of the test.
"""

from __future__ import annotations

import os

from hypothesis import settings

SAME, FUZZ = "same", "fuzz"
settings.register_profile(SAME, derandomize=True, database=None, deadline=None)
settings.register_profile(FUZZ, max_examples=int(os.environ.get("EXAMPLES") or 1000), deadline=None, print_blob=True)


def examples(usual: int) -> int:
    """Of one test: the usual number, or what EXAMPLES requests."""
    return int(os.environ.get("EXAMPLES") or usual)

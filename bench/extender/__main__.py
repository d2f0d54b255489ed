"""`python -m bench.extender`: filter, and unless there are flags for it, preempt."""

import sys

from bench.extender.filter import main as filter_calls
from bench.extender.preempt import main as preempt_calls

sys.exit(filter_calls() or (preempt_calls() if len(sys.argv) == 1 else 0))

"""Which pods to preempt so that a pending pod fits, at the least cost."""

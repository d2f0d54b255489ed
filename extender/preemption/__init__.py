"""Preemption: the preempt verb, evictions for pods that the scheduler cannot help, and what is remembered of them."""

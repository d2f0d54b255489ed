"""Placement: the free capacity of a cluster, the best node and GPUs for a pod, and whom to preempt for it."""

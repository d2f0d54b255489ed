"""Placement: the free capacity of a cluster, the best node and GPUs for a pod, and which pods to preempt for it."""

"""The node's GPUs: found through NVML, watched, and published as the node's inventory."""

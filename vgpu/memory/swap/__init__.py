"""Which container's memory above its guarantee leaves a GPU for host memory, and which comes back, when. `policy` has the rules in their order."""

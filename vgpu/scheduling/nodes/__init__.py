"""What pods require of nodes beside GPUs, and how nodes are found by name and label."""

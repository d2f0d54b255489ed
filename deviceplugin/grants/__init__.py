"""Grant directories: what a container is given on its node, written before it starts and removed after it ended."""

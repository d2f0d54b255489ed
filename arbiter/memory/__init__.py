"""Memory limits of the containers of a node: connections, leases, readings of NVML, and what follows from them."""

"""The node's pods: what the API server and /proc say of them, and what they use."""

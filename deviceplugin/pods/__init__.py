"""The node's pods: their state in the API server and in /proc, and what they use."""

"""GPU memory of a container: who allocated what, what counts against its limit, and which processes bypass it."""

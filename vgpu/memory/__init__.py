"""GPU memory of a container: which process allocated what, what counts against its limit, and which processes bypass it."""

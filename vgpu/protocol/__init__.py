"""What the library, the arbiter and the readers of its status send each other."""

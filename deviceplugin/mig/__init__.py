"""MIG instances that are made when pods request them."""

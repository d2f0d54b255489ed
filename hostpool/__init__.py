"""The host pool of a node: memory to which the arbiter swaps GPU memory, and the copiers that copy it.

Decides which GPU has a copier, how large its pool is, and when a copier is started again. It swaps nothing, and removes no pool file.
"""

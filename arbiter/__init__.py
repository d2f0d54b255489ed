"""The arbiter: one process on each GPU node. It decides which process may lease GPU memory now, and which container may run on a GPU.

It serves a socket in every grant directory, keeps one ledger for each (`vgpu.memory.ledger`), and exports metrics. It writes
nothing but those sockets, so a restart loses nothing: the libraries connect again and state their leases.
"""

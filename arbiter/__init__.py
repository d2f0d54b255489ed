"""The arbiter: one process on each GPU node that decides which container's process may take GPU memory now.

It serves a socket in every grant directory, keeps one ledger for each (`vgpu.memory.ledger`), and tells what it sees as metrics. It
writes nothing but those sockets, so that its own restart loses nothing: the libraries come back and state what they hold.
"""

"""Give containers the devices that their pod was assigned, and what must come with them: one a GPU node."""

"""GPU time: which container may run on a GPU now, and whether a suspend stopped what it should."""

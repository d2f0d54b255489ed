"""GPU time of the containers of a node: usage reports, suspend and resume, and the threads that order them."""

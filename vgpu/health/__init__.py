"""Which GPUs a node has, how well each is, and what follows for its pods. Pure: values in, values out."""

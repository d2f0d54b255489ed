"""The only importer of pynvml: what GPUs there are, whether they are well, who uses them."""

"""The only importer of pynvml: what cards there are, whether they are well, who uses them."""

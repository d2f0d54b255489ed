"""The only importer of pynvml: which GPUs there are, their health, and the processes that use them."""

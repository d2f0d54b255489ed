"""The domain of Tangram: what a share of a GPU is, which pod gets one, and what its container is given.

Pure: values in, values out. Nothing in this package opens a socket, reads a clock, logs, or knows Kubernetes, NVML or gRPC.
"""

"""The domain of Tangram: what a share of a GPU is, who gets one, and what a container is told about it.

Pure: values in, values out. Nothing in this package opens a socket, reads a clock, logs, or knows Kubernetes, NVML or gRPC.
"""

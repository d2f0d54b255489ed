"""Calls to the Kubernetes API: raw bytes in and out, decoded by msgspec into slim structs.

The only package that imports `kubernetes`, and it does so for kubeconfig files alone: the extra `kubeconfig`, which images leave out. A
program in a cluster needs a token and a CA from two files, and importing the client costs 1.2 s and 23 MiB (measured). Its models are
never used: listing 10,000 pods takes 16.5 s and 1 GB through them, 0.13 s and 30 MB into slim structs (measured).
"""

"""Nominating pods to nodes before the scheduler tries them."""

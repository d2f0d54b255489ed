"""Declared MIG: the file of layouts, and the plan that leads a GPU to one."""

"""Tensors that autograd saves: recompute, offload, eviction, schedules, tiling and capture."""

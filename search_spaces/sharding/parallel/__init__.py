"""Techniques that divide the compute itself over ranks: tensor, sequence, head and pipeline parallelism."""

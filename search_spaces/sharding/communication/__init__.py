"""Techniques that change the collectives of sharded tensors: plain, quantized, hierarchical, ring."""

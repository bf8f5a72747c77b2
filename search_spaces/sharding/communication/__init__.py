"""How sharded tensors travel: plain, quantised, hierarchical, ring."""

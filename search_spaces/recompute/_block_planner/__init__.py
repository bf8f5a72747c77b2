"""Plan which tensors each block saves, recomputes or offloads within a byte budget (`planned`)."""

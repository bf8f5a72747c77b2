"""How the compute itself is cut over the ranks: tensor, sequence, head, pipeline."""

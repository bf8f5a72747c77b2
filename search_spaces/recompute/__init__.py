"""Recompute activations in backward instead of keeping them: fewer bytes for more FLOPs."""

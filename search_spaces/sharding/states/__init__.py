"""Techniques that shard parameters, gradients and optimizer state over ranks: bytes for communication."""

"""Techniques that offload parameters, gradients and optimizer state: device bytes for link and host time."""

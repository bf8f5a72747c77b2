"""Techniques that offload states and activations from device memory."""

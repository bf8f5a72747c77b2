"""Techniques that offload saved activations: device bytes for traffic on the host link."""

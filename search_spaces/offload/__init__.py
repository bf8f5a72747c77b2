"""What lives outside device memory while it is not needed: states and activations."""

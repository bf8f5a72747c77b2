"""Which ranks hold which part of parameters, gradients and optimizer state: bytes for communication."""

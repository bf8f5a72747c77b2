"""Which activations are computed a second time in backward instead of being kept: bytes for FLOPs."""

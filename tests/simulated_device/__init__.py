"""Tests on the simulated accelerator."""

CAPACITY_BYTES = 256 << 20

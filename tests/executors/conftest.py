"""Tests of executors run real processes."""

from support.processes.ground import ground

__all__ = ["ground"]

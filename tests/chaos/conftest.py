"""Tests that kill processes use the same ground as those of executors."""

from support.processes.ground import ground

__all__ = ["ground"]

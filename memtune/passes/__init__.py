"""Passes that several techniques share, each the mirror of one mechanism of `memtune.runtime`."""

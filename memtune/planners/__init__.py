"""Planners: pure functions from numbers to decisions."""

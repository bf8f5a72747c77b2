"""Conformance suite for techniques: drift test, seeded defects, training runs."""

from memtune.testing.drift_check import compare, drift, recorded, rewritten
from memtune.testing.seeded_defects import Mutation, mutations
from memtune.testing.suite import TechniqueSuite
from memtune.testing.training import Run, differences, on_device, train

__all__ = [
    "Mutation",
    "Run",
    "TechniqueSuite",
    "compare",
    "differences",
    "drift",
    "mutations",
    "on_device",
    "recorded",
    "rewritten",
    "train",
]

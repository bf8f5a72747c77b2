"""What every technique must pass, as a pytest base class, and the defects that it must notice.

A technique's test inherits `TechniqueSuite`, says which technique and which models, and adds one to three cases of its
own. pytest is imported when a suite is defined, not when this package is.
"""

from memtune.testing.drift import compare, drift, recorded, rewritten
from memtune.testing.mutations import Mutation, mutations
from memtune.testing.suite import TechniqueSuite
from memtune.testing.training import Run, differences, train

__all__ = [
    "Mutation",
    "Run",
    "TechniqueSuite",
    "compare",
    "differences",
    "drift",
    "mutations",
    "recorded",
    "rewritten",
    "train",
]

"""Recompute of every block: nothing inside a block is saved."""

from __future__ import annotations

import pytest
from zoo_paths import ZOO

from memtune.search_spaces.recompute.full import Full
from memtune.testing import TechniqueSuite, rewritten


class TestFull(TechniqueSuite):
    technique = Full
    models = ZOO
    quick = ("tied",)

"""Coop: neighbours are evicted together.

Distinguishing test: victims are neighbours, and fragmentation when a search starts stays within a few
percent.
"""

from __future__ import annotations

from typing import ClassVar

from support.zoo_paths import ZOO

from memtune.search_spaces.recompute.coop import Coop
from memtune.testing import TechniqueSuite


class TestCoop(TechniqueSuite):
    technique = Coop
    models: ClassVar = {name: ZOO[name] for name in ("cnn_bn", "lora")}
    variants = (Coop(ratio=0.3), Coop(ratio=0.5, groups=2, neighbours=False, small_area=False))
    quick = ("cnn_bn",)

    @classmethod
    def default(cls) -> Coop:
        return Coop(ratio=0.5)

    def test_knobs_say_what_the_policy_is_made_of(self) -> None:
        plain = Coop().policy()
        assert (plain.groups, plain.neighbours, plain.small_bytes, plain.in_place) == (
            1,
            "closure",
            10 * 1024,
            True,
        )
        bare = Coop(groups=2, neighbours=False, small_area=False).policy()
        assert (bare.groups, bare.neighbours, bare.small_bytes) == (2, "own", 0)

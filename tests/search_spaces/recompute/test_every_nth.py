"""Recompute of one block in n: the others save what they saved before.

Distinguishing test: blocks 0, n, 2n, … save nothing inside them, all others save what they saved before.
"""

from __future__ import annotations

from typing import ClassVar

import pytest
from support.zoo_paths import ZOO

from memtune.api import apply
from memtune.errors import ApplyError
from memtune.search_spaces.recompute.every_nth import EveryNth
from memtune.testing import TechniqueSuite, rewritten
from memtune.testing.drift_check import plain_program, target_of
from memtune.testing.training import build, settings_of


class TestEveryNth(TechniqueSuite):
    technique = EveryNth
    models: ClassVar = {name: path for name, path in ZOO.items() if name not in ("autocast", "tobf16")}
    quick = ("gpt",)
    variants = (EveryNth(kind="every_nth"), EveryNth(kind="every_nth", n=3))

    def test_blocks_in_between_save_what_they_saved(self) -> None:
        plain, step = rewritten(ZOO["gpt"]), rewritten(ZOO["gpt"], self.default())
        saved = [step.saved_bytes(block) for block in range(4)]
        assert [saved[0], saved[2]] == [2 * 32 * 64 * 4] * 2
        assert [saved[1], saved[3]] == [plain.saved_bytes(1), plain.saved_bytes(3)]

    def test_more_than_the_blocks_is_a_reason(self) -> None:
        program, technique = plain_program(ZOO["gpt"]), EveryNth(kind="every_nth", n=4)
        assert "4 blocks" in str(technique.fits(program, target_of(technique)))
        assert self.default().fits(program, target_of()) is None
        _, model, optimizer = build(ZOO["gpt"])
        with pytest.raises(ApplyError, match="n=4 would recompute one of 4 blocks"):
            apply(model, optimizer, {"settings": settings_of(technique)}, strict=False)

"""No recomputation: autograd keeps what it keeps."""

from __future__ import annotations

from typing import ClassVar

from support.zoo_paths import ZOO

from memtune.search_spaces.recompute.none import KeepAll
from memtune.testing import TechniqueSuite


class TestKeepAll(TechniqueSuite):
    technique = KeepAll
    models: ClassVar = {name: ZOO[name] for name in ("gpt", "cnn_bn")}
    quick = ("gpt",)

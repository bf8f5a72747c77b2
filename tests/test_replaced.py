"""Replaced functions of other libraries."""

from __future__ import annotations

import pytest
import torch.nn.functional as F

from memtune._replaced import replaced


def fails() -> None:
    with replaced(F, relu=abs, gelu=abs):
        assert (F.relu, F.gelu) == (abs, abs)
        _ = 1 // 0


def test_replaced_functions_are_restored_after_an_error() -> None:
    before = F.relu, F.gelu
    with pytest.raises(ZeroDivisionError):
        fails()
    assert (F.relu, F.gelu) == before

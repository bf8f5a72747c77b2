"""Libraries that take another path when they notice fake tensors, kept on the path that training takes."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_ONE_SEQUENCE = "assumed that no sample holds several packed sequences: transformers decides by looking at position_ids"


@contextmanager
def as_in_training(assumed: list[str]) -> Iterator[None]:
    """Inside, Hugging Face models choose their attention mask as they would on real data; adds to `assumed` what was assumed.

    On fake tensors transformers cannot see that nothing is packed, so it builds a full mask and gives up the causal kernel:
    other ops, and a whole mask more at the peak.
    """
    module: Any = sys.modules.get("transformers.masking_utils")
    original = getattr(module, "find_packed_sequence_indices", None)
    if original is None:
        yield
        return

    def find_packed_sequence_indices(position_ids: Any) -> Any:
        found = original(position_ids)
        if found is not None:
            (found[:, -1] == 0).all()  # the ops of the look that it takes in training
            if _ONE_SEQUENCE not in assumed:
                assumed.append(_ONE_SEQUENCE)
        return None

    module.find_packed_sequence_indices = find_packed_sequence_indices
    try:
        yield
    finally:
        module.find_packed_sequence_indices = original

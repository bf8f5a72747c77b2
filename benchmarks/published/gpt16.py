"""The GPT of `examples/gpt.py` with 16-bit weights and gradients, as the papers' systems send them; its
environment sets the shape.
"""

import importlib.util
from pathlib import Path

from torch import nn

_FILE = Path(__file__).parents[2] / "examples" / "gpt.py"
_spec = importlib.util.spec_from_file_location("memtune_example_gpt", _FILE)
assert _spec is not None
assert _spec.loader is not None
_example = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_example)

batch, loss, optimizer, global_batch = (
    _example.batch,
    _example.loss,
    _example.optimizer,
    _example.global_batch,
)


def model() -> nn.Module:
    """Return the GPT in bfloat16."""
    return _example.model().bfloat16()  # type: ignore[no-any-return]

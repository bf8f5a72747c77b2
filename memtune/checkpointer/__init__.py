"""Checkpoints: state dicts, torch.distributed.checkpoint folders, safetensors files."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memtune._door import open_door

if TYPE_CHECKING:
    from memtune.checkpointer import distributed as distributed
    from memtune.checkpointer.distributed import load_full_state_dict as load_full_state_dict
    from memtune.checkpointer.safetensors import export as export
    from memtune.checkpointer.state_dict import full_state_dict as full_state_dict
else:
    __getattr__ = open_door(__name__)

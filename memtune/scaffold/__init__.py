"""`memtune init`: a `model.py` from a Hugging Face config or from the user's own class or function."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memtune._door import open_door

if TYPE_CHECKING:
    from memtune.scaffold.model_writer import write_model_file as write_model_file
else:
    __getattr__ = open_door(__name__)

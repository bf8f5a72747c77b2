"""Upload of a batch: its tensors through the seam, and objects with a `.to` of their own."""

from __future__ import annotations

import torch
from torch.nn.utils.rnn import pack_sequence

from memtune.runtime.training_step import upload

META = torch.device("meta")


class Graphs:
    """A leaf that is no tensor and has its own `.to`, as a PyG batch has."""

    device = torch.device("cpu")

    def to(self, device: torch.device) -> Graphs:
        self.device = device
        return self


def test_upload_moves_leaves_with_a_to_method() -> None:
    packed, graphs = pack_sequence([torch.ones(3, 2), torch.ones(1, 2)]), Graphs()
    there = upload({"words": packed, "more": [graphs, 3, "name"]}, META)
    assert there["words"].data.device == META
    assert there["more"] == [graphs, 3, "name"]
    assert graphs.device == META


def test_upload_to_the_same_device_copies_tensors_only() -> None:
    packed, x = pack_sequence([torch.ones(3, 2)]), torch.ones(2)
    there = upload((packed, x), torch.device("cpu"))
    assert there[0] is packed
    assert torch.equal(there[1], x)
    assert there[1].data_ptr() != x.data_ptr()

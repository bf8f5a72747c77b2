"""Upload of a batch: its tensors through the seam, and objects with a `.to` of their own."""

from __future__ import annotations

import torch
from torch.nn.utils.rnn import pack_sequence

from memtune.runtime.training_step import upload

META = torch.device("meta")


class Graphs:
    """A leaf that is no tensor and moves itself, as a PyG batch does."""

    device = torch.device("cpu")

    def to(self, device: torch.device) -> Graphs:
        self.device = device
        return self


def test_leaves_that_move_themselves_go_to_the_device() -> None:
    packed, graphs = pack_sequence([torch.ones(3, 2), torch.ones(1, 2)]), Graphs()
    there = upload({"words": packed, "more": [graphs, 3, "name"]}, META)
    assert there["words"].data.device == META
    assert there["more"] == [graphs, 3, "name"]
    assert graphs.device == META


def test_on_the_same_device_what_moves_itself_stays_the_same_and_tensors_are_copies() -> None:
    packed, x = pack_sequence([torch.ones(3, 2)]), torch.ones(2)
    there = upload((packed, x), torch.device("cpu"))
    assert there[0] is packed
    assert torch.equal(there[1], x)
    assert there[1].data_ptr() != x.data_ptr()

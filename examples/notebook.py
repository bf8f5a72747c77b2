"""From Python: plan with objects that were never in a file, look at the result, draw it.

    python examples/notebook.py

Every cell of a notebook could hold these lines. `memtune.search` takes the same arguments and runs
real trials.
"""

import torch
from torch import Tensor, nn

import memtune


class Net(nn.Module):
    """Four residual layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(4)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Return features."""
        for layer in self.layers:
            x = x + layer(x)
        return x


def main() -> None:
    """Plan for one CPU rank and print the ranking."""
    found = memtune.plan(
        Net(),
        batch=torch.randn(16, 64),
        loss=lambda model, batch: model(batch).square().mean(),
        device="cpu",
        global_batch=64,
        axes=["recompute", "execution"],
    )
    print(found)
    print(found.plot().description)


if __name__ == "__main__":
    main()

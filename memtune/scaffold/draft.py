"""A `model.py` in parts, and its text. Lines that hold a guess are marked CHECK."""

from __future__ import annotations

from dataclasses import dataclass
from textwrap import indent

MARK = "# CHECK:"


@dataclass(frozen=True)
class Draft:
    """The parts of a `model.py`."""

    title: str
    """Name of the model, for the docstring."""
    origin: str
    """Target of `memtune init`."""
    imports: tuple[str, ...]
    settings: tuple[str, ...]
    """Lines at the top level: sizes, configuration."""
    model: tuple[str, ...]
    """Body of `model()`."""
    batch: tuple[str, ...]
    """Body of `batch(size)`."""
    loss: tuple[str, ...]
    """Body of `loss(model, batch)`."""
    optimizer: tuple[str, ...] = ("return torch.optim.AdamW(params, lr=1e-4)" + f"  {MARK} your optimizer",)
    global_batch: int = 8

    def text(self, name: str) -> str:
        """Return the file; `name` is its own, for the commands in its docstring."""
        return "\n".join(
            [
                f'"""{self.title} for memtune, from `memtune init {self.origin}`.',
                "",
                f"    memtune plan {name} --gpus 1 --gpu-type h100-80g    predicts, needs no GPU",
                f"    memtune search {name}                               measures on this machine",
                "",
                f"Lines with {MARK[2:-1]} hold what could not be known.",
                '"""',
                "",
                *self.imports,
                "",
                *self.settings,
                f"global_batch = {self.global_batch}  {MARK} samples per optimizer step over all ranks",
                *_function("def model():", self.model),
                *_function("def batch(size):", self.batch),
                *_function("def loss(model, batch):", self.loss),
                *_function("def optimizer(params):", self.optimizer),
                "",
            ]
        )


def _function(head: str, body: tuple[str, ...]) -> list[str]:
    return ["", "", head, *(indent(line, "    ") for line in body)]


def marked(text: str) -> list[str]:
    """Return the lines of a file that hold a guess, each with its number."""
    return [f"{number}: {line.strip()}" for number, line in enumerate(text.splitlines(), 1) if MARK in line]

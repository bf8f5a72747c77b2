"""Train a small Llama with Trainer, Accelerate and Lightning after `memtune.apply`, and without it.

    pip install 'transformers>=5' accelerate pytorch-lightning
    python benchmarks/training_libraries.py

Prints for each library and setting whether all losses are equal to the bit, their largest relative
difference, or the message that refuses it; with clipping that changes gradients, and without.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import tempfile
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer
from torch.utils.data import DataLoader, Dataset

import memtune
from memtune.config import load_config
from memtune.errors import MemtuneError

SETTINGS: dict[str, dict[str, Any]] = {
    "recompute: full": {"recompute": {"kind": "full"}},
    "recompute: selective": {"recompute": {"kind": "selective"}},
    "split: tiled": {"split": {"kind": "tiled"}},
    "offload.activations: copy_out": {"offload": {"activations": {"kind": "copy_out"}}},
    "offload.states: optimizer_cpu": {"offload": {"states": {"kind": "optimizer_cpu"}}},
    "offload.states: zero_offload": {"offload": {"states": {"kind": "zero_offload"}}},
    "offload.states: l2l": {"offload": {"states": {"kind": "l2l"}}},
}
CLIP, STEPS, MICRO_BATCH, ACCUMULATE = 0.01, 4, 4, 2
Applied = Callable[[nn.Module], tuple[nn.Module, Optimizer]]
"""Function that makes the optimizer of a model, and applies a config to both or not."""


def build() -> nn.Module:
    """Return a Llama of three layers with the same weights each time."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "vocab_size": 64}
    made: nn.Module = LlamaForCausalLM(
        LlamaConfig(num_attention_heads=4, num_key_value_heads=2, use_cache=False, **sizes)
    )
    return made


class Tokens(Dataset[dict[str, Tensor]]):
    """Random tokens, the same ones each time."""

    def __len__(self) -> int:
        """Return the number of samples."""
        return MICRO_BATCH * ACCUMULATE * STEPS

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """Return one sample."""
        tokens = torch.randint(64, (16,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": tokens, "labels": tokens}


def trainer(applied: Applied, clip: float) -> list[float]:
    """Return the losses of transformers' Trainer."""
    from transformers import Trainer, TrainingArguments

    model, optimizer = applied(build())
    arguments = TrainingArguments(
        output_dir=tempfile.mkdtemp(),
        per_device_train_batch_size=MICRO_BATCH,
        gradient_accumulation_steps=ACCUMULATE,
        max_steps=STEPS,
        max_grad_norm=clip,
        logging_steps=1,
        report_to=[],
        save_strategy="no",
        use_cpu=True,
        disable_tqdm=True,
    )
    running = Trainer(model=model, args=arguments, train_dataset=Tokens(), optimizers=(optimizer, None))
    with contextlib.redirect_stdout(io.StringIO()):
        running.train()
    return [row["loss"] for row in running.state.log_history if "loss" in row]


def accelerate(applied: Applied, clip: float) -> list[float]:
    """Return the losses of a loop with Accelerate."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=ACCUMULATE)
    model, optimizer, loader = accelerator.prepare(*applied(build()), DataLoader(Tokens(), MICRO_BATCH))
    losses = []
    for batch in loader:
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients and clip:
                accelerator.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def lightning(applied: Applied, clip: float) -> list[float]:
    """Return the losses of Lightning."""
    import pytorch_lightning

    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
    losses: list[float] = []

    class Module(pytorch_lightning.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.net = build()

        def training_step(self, batch: dict[str, Tensor], index: int) -> Tensor:
            loss: Tensor = self.net(**batch).loss
            losses.append(loss.item())
            return loss

        def configure_optimizers(self) -> Optimizer:
            return applied(self.net)[1]

    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    pytorch_lightning.Trainer(
        accelerator="cpu",
        max_steps=STEPS,
        accumulate_grad_batches=ACCUMULATE,
        gradient_clip_val=clip or None,
        enable_model_summary=False,
        **quiet,
    ).fit(Module(), DataLoader(Tokens(), MICRO_BATCH))
    return losses


def plain(model: nn.Module) -> tuple[nn.Module, Optimizer]:
    """Return the model as it is, with its optimizer."""
    return model, AdamW(model.parameters(), lr=1e-2)


def difference(losses: list[float], expected: list[float]) -> str:
    """Return `equal`, or the largest relative difference."""
    most = max(abs(one / other - 1) for one, other in zip(losses, expected, strict=True))
    return "equal" if losses == expected else f"within {most:.1e}"


def main() -> None:
    """Train with each library, clipping and setting; print a row each."""
    warnings.filterwarnings("ignore")
    os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    torch.set_num_threads(1)
    for library in (trainer, accelerate, lightning):
        for clip in (CLIP, 0.0):
            expected = library(plain, clip)
            for name, settings in SETTINGS.items():

                def applied(
                    model: nn.Module, settings: dict[str, Any] = settings
                ) -> tuple[nn.Module, Optimizer]:
                    return tuple(memtune.apply(*plain(model), load_config({"settings": settings})))

                try:
                    found = difference(library(applied, clip), expected)
                except MemtuneError as error:
                    found = f"refused: {error.what}"
                print(f"{library.__name__:<11} clip {clip:<5} {name:<30} {found}", flush=True)


if __name__ == "__main__":
    main()

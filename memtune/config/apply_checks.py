"""Checks of a config against the live model, its ranks and the machine, before `apply` changes anything."""

from __future__ import annotations

import hashlib
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from memtune.config.tuned_config import MadeFor, Settings, TunedConfig
from memtune.device import DEFAULT_ACCELERATOR
from memtune.errors import ApplyError, ConfigError

if TYPE_CHECKING:
    from torch import nn


def fingerprint(model: nn.Module) -> str:
    """Return `sha256:` over names, shapes and dtypes of the parameters; values and device do not matter."""
    digest = hashlib.sha256()
    for name, parameter in model.named_parameters():
        digest.update(f"{name} {tuple(parameter.shape)} {parameter.dtype}\n".encode())
    return f"sha256:{digest.hexdigest()[:16]}"


def check_made_for(config: TunedConfig, model: nn.Module, ranks: int) -> None:
    """Compare the config with the present model and ranks; a config without `made_for` fits any.

    Raises:
        ConfigError: The config was made for another model or another number of ranks.
    """
    made_for = config.made_for
    if made_for is None:
        return
    if made_for.model and made_for.model != fingerprint(model):
        raise _other_model(made_for, model, "run  memtune search  on this model, or pass strict=False")
    if made_for.ranks != ranks:
        again = f"--device cpu --workers {ranks}" if made_for.device == "cpu" else f"--gpus {ranks}"
        then = f"{made_for.ranks} rank{'s' * (made_for.ranks > 1)}"
        raise ConfigError(
            f"this config was made for {then}, here {'are' if ranks > 1 else 'is'} {ranks}.",
            fix=f"torchrun --nproc-per-node {made_for.ranks} …, or search again with {again}",
            code="MT206",
        )


def check_machine(config: TunedConfig, device: str, hardware: str, torch_version: str) -> None:
    """Compare the machine with the one that the config was made on.

    Args:
        config: A config; one without `made_for` fits any machine.
        device: `cpu` or `cuda`.
        hardware: Name of the machine, as `memtune doctor` prints it.
        torch_version: Version of the present torch; patch releases and builds are not distinguished.

    Raises:
        ConfigError: The config has a plan, which was made with another torch or for another device.
    """
    # A plan is decided op by op, so it holds only for one release of torch and one kind of device, and
    # is refused on others. Settings without a plan still train; a warning reports that the measured
    # figures do not hold.
    made_for = config.made_for
    if made_for is None or not made_for.torch:
        return
    then = {"torch": made_for.torch, "device": made_for.device, "hardware": made_for.hardware}
    now = {"torch": torch_version, "device": device, "hardware": hardware}
    other = [name for name in then if _release(then[name]) != _release(now[name])]
    if not other:
        return
    difference = "; ".join(f"{name}: {then[name]} then, {now[name]} now" for name in other)
    plans = [config.plan, *(each.plan for each in config.buckets)]
    planned = sorted({slot for each in plans for slot, plan in each.items() if not plan.is_empty})
    if planned:
        raise ConfigError(
            f"the plan of {', '.join(planned)} in this config was made on another machine.",
            evidence=f"{difference}.",
            fix="run  memtune search  here, or pass strict=False",
            code="MT206",
        )
    warnings.warn(
        f"this config was tuned on another machine ({difference}): its measured figures do not hold here.",
        stacklevel=5,
    )


def _release(text: str) -> str:
    """Return `2.13` of `2.13.0+cpu`; other names unchanged."""
    return ".".join(text.split(".")[:2])


def check_blocks(config: TunedConfig, model: nn.Module, blocks: Sequence[str]) -> None:
    """Require that the model has every block that the config was made with.

    Raises:
        ConfigError: A block's name is no module of the model.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    if config.made_for is not None and any(name not in modules for name in blocks):
        raise _other_model(
            config.made_for, model, "run  memtune search  on this model, or remove made_for from the config"
        )


def _other_model(made_for: MadeFor, model: nn.Module, fix: str) -> ConfigError:
    count = sum(parameter.numel() for parameter in model.parameters())
    return ConfigError(
        "this config was made for another model.",
        evidence=(
            f"It was made for {made_for.parameters:,} parameters ({made_for.model}), "
            f"this model has {count:,} ({fingerprint(model)})."
        ),
        fix=fix,
        code="MT206",
    )


def check_environment(settings: Settings, *, device: str = DEFAULT_ACCELERATOR) -> None:
    """Check that the variables of `Settings.env` were set when the device started; on CPU none has an
    effect.

    Raises:
        ApplyError: A variable is missing, different, or was set too late. The message has the `export` line.
    """
    wanted = {} if device == "cpu" else settings.env()
    found = [
        f"{name}={os.environ.get(name, '(not set)')}"
        for name, value in wanted.items()
        if os.environ.get(name) != value
    ]
    if found or (wanted and _started_without(wanted)):
        raise ApplyError(
            "the allocator settings of this config must be in the environment before the device starts.",
            evidence=f"Now: {', '.join(found)}." if found else "The device had started before they were set.",
            fix="export "
            + " ".join(f"{name}={value}" for name, value in wanted.items())
            + "   or  memtune run tuned.yaml -- python train.py",
            code="MT314",
        )


def _started_without(wanted: Mapping[str, str]) -> bool:
    """Return True if torch says that the device runs here with other allocator settings than `wanted`."""
    import torch

    from memtune.device import accelerator

    # Private, and absent from older releases of torch; without it the environment alone is checked.
    in_effect: Callable[[], str] | None = getattr(torch._C, "_accelerator_getAllocatorSettings", None)
    if in_effect is None or not accelerator.is_started():
        return False
    options = set(in_effect().split(","))
    return any(
        not set(value.split(",")) <= options for name, value in wanted.items() if name.endswith("_ALLOC_CONF")
    )

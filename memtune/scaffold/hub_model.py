"""A model of Hugging Face transformers as a `model.py`: its config, no weights."""

from __future__ import annotations

import difflib
import json
import logging
import os
from pathlib import Path
from pprint import pformat
from typing import Any

from memtune._optional import require
from memtune.errors import EnvironmentFault, UsageError, missing_file
from memtune.scaffold.draft import MARK, Draft

# Heads by the end of a class's name: (body of batch without its return, entries of the batch). Sizes in
# capitals are defined from the config.
_TOKENS = "tokens = torch.randint(VOCAB, (size, SEQ))"
_HEADS: dict[str, tuple[str, str]] = {
    "ForCausalLM": (_TOKENS, '"input_ids": tokens, "labels": tokens'),
    "LMHeadModel": (_TOKENS, '"input_ids": tokens, "labels": tokens'),
    "ForMaskedLM": (_TOKENS, '"input_ids": tokens, "labels": tokens'),
    "ForConditionalGeneration": (_TOKENS, '"input_ids": tokens, "labels": tokens'),
    "ForSequenceClassification": (_TOKENS, '"input_ids": tokens, "labels": torch.randint(LABELS, (size,))'),
    "ForTokenClassification": (_TOKENS, '"input_ids": tokens, "labels": torch.randint(LABELS, (size, SEQ))'),
    "ForQuestionAnswering": (
        _TOKENS,
        '"input_ids": tokens, "start_positions": torch.randint(SEQ, (size,)), "end_positions":'
        " torch.randint(SEQ, (size,))",
    ),
    "ForImageClassification": (
        "images = torch.randn(size, CHANNELS, IMAGE, IMAGE)",
        '"pixel_values": images, "labels": torch.randint(LABELS, (size,))',
    ),
    "ForAudioClassification": (
        "sound = torch.randn(size, SAMPLES)",
        '"input_values": sound, "labels": torch.randint(LABELS, (size,))',
    ),
}
_HEARD = '"input_ids": tokens', '"input_features": torch.randn(size, MEL, FRAMES)'
"""The entry of models that read text, and that of models that read spectrograms."""
_TASKS = ("SEQ_TO_SEQ_CAUSAL_LM", "MASKED_LM", "CAUSAL_LM", "IMAGE_CLASSIFICATION", "AUDIO_CLASSIFICATION")
"""Tasks to look for a head in, if neither target nor config names one."""
_LONGEST = 2048
_OMIT = {
    "transformers_version",
    "model_type",
    "architectures",
    "dtype",
    "torch_dtype",
    "_name_or_path",
    "use_cache",
}


def is_hub_target(target: str) -> bool:
    """Return whether `target` is a config file or folder, an id `owner/name`, or a name of transformers."""
    path = Path(target)
    if path.suffix == ".json" or (path / "config.json").is_file():
        return True
    if target.count("/") == 1 and ":" not in target and not path.exists() and path.suffix != ".py":
        return True
    return target.isidentifier() and _known(target)


def _known(name: str) -> bool:
    if not name.endswith(tuple(_HEADS)) and name != name.lower():
        return False
    try:
        transformers = require("transformers")
    except EnvironmentFault:
        if name.endswith(tuple(_HEADS)):  # nothing else is called so
            raise
        return False
    return name in transformers.CONFIG_MAPPING or hasattr(transformers, name)


def unknown_name(target: str) -> UsageError:
    """Return the error for a bare name that is neither a module nor one of transformers."""
    try:
        transformers = require("transformers")
    except EnvironmentFault:
        known: list[str] = []
    else:
        heads = (each for each in dir(transformers) if each.endswith(tuple(_HEADS)))
        known = [*transformers.CONFIG_MAPPING, *heads]
    near = difflib.get_close_matches(target, known, 3)
    return UsageError(
        f"{target} is neither a module nor a class or model type of transformers.",
        evidence=f"Near: {', '.join(near)}." if near else "",
        fix=f"memtune init {near[0] if near else 'package.module:Name'}",
        code="MT150",
    )


def hub_draft(target: str) -> Draft:
    """Return the draft for a Hugging Face id, a `config.json` or its folder, a model class or a model type.

    Raises:
        EnvironmentFault: transformers is missing, or the config of an id can neither be downloaded nor found.
        UsageError: The config has no model with a head that memtune can make a loss for.
    """
    transformers = require("transformers")
    config = _config(transformers, target)
    name, is_guess = _architecture(transformers, config, target)
    head = next((each for each in _HEADS if name.endswith(each)), None)
    if head is None:
        raise UsageError(
            f"{name} has a head for which memtune init knows no batch.",
            evidence=f"Known: {', '.join(f'*{each}' for each in _HEADS)}.",
            fix="name another class of the same family, or write model.py by hand",
            code="MT151",
        )
    prepare, entries = _HEADS[head]
    if getattr(transformers, name).main_input_name == "input_features" and hasattr(config, "num_mel_bins"):
        entries = entries.replace(*_HEARD)
    settings = _sizes(config, prepare + entries)
    values = {key: value for key, value in _differences(config).items() if key not in _OMIT}
    if getattr(config, "is_encoder_decoder", False) and not hasattr(config, "decoder_start_token_id"):
        values["decoder_start_token_id"] = getattr(config, "pad_token_id", None) or 0
    note = f"  {MARK} the config names no class" if is_guess else ""
    kind = type(config).__name__
    return Draft(
        title=name,
        origin=target,
        imports=("import torch", f"from transformers import {kind}, {name}"),
        settings=(
            *settings,
            f"BFLOAT16 = True  {MARK} autocast, float32 weights, as Trainer(bf16=True) does",
            *([f"CONFIG = {pformat(values, width=100, sort_dicts=False)}"] if values else []),
        ),
        model=(
            f"config = {kind}.from_dict(CONFIG)" if values else f"config = {kind}()",
            *(["config.use_cache = False"] if getattr(config, "use_cache", None) is not None else []),
            f"return {name}(config){note}",
        ),
        batch=(prepare + f"  {MARK} random samples", f"return {{{entries}}}"),
        loss=(
            "device = next(model.parameters()).device.type",
            "with torch.autocast(device, torch.bfloat16, enabled=BFLOAT16):",
            "    return model(**batch).loss",
        ),
    )


def _config(transformers: Any, target: str) -> Any:
    path = Path(target)
    file = path if path.suffix == ".json" else path / "config.json"
    if path.suffix == ".json" and not file.is_file():
        raise missing_file(target, "give the path of a config.json", "MT151")
    if file.is_file():
        try:
            document = json.loads(file.read_text(encoding="utf-8"))
            return transformers.AutoConfig.for_model(**document)
        except (ValueError, KeyError, TypeError) as error:
            raise UsageError(
                f"{file} is no config that transformers {transformers.__version__} knows.",
                evidence=str(error).splitlines()[0][:300],
                fix="update transformers, or use a model class that it has",
                code="MT151",
            ) from error
    if target in transformers.CONFIG_MAPPING:
        return transformers.CONFIG_MAPPING[target]()
    if target.isidentifier():
        return getattr(transformers, target).config_class()
    return _downloaded(transformers, target)


def _downloaded(transformers: Any, target: str) -> Any:
    """Return the config of an id from the cache or the hub; only `config.json` is downloaded."""
    log = logging.getLogger("huggingface_hub")
    level = log.level
    log.setLevel(logging.ERROR)  # it warns of each retry; the error below says the same once
    try:
        return transformers.AutoConfig.from_pretrained(target)
    except (OSError, ValueError) as error:
        offline = " (HF_HUB_OFFLINE is set)" if os.environ.get("HF_HUB_OFFLINE", "0") not in ("", "0") else ""
        raise EnvironmentFault(
            f"The config of {target} is not in the cache and cannot be downloaded{offline}.",
            evidence=str(error).strip().splitlines()[0][:300],
            fix=(
                "run where the hub can be reached, or save its config.json and pass the path; a class such as"
                " LlamaForCausalLM needs neither"
            ),
            code="MT152",
        ) from error
    finally:
        log.setLevel(level)


def _architecture(transformers: Any, config: Any, target: str) -> tuple[str, bool]:
    """Return the model class, and whether it is a guess."""
    if target.isidentifier() and target not in transformers.CONFIG_MAPPING:
        return target, False
    for name in getattr(config, "architectures", None) or ():
        if name.endswith(tuple(_HEADS)) and hasattr(transformers, name):
            return name, False
    auto = transformers.models.auto.modeling_auto
    for task in _TASKS:
        found = getattr(auto, f"MODEL_FOR_{task}_MAPPING_NAMES").get(config.model_type)
        if found is not None:
            return (found if isinstance(found, str) else found[0]), True
    raise UsageError(
        f"{target} ({config.model_type}) names no model with a loss.",
        evidence=f"Looked for classes that end in {', '.join(_HEADS)}.",
        fix="name the class, such as LlamaForCausalLM",
        code="MT151",
    )


def _sizes(config: Any, used: str) -> tuple[str, ...]:
    """Return the definitions of the sizes that a batch uses, from the config."""
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    limits = (
        getattr(text, name, None)
        for name in ("max_position_embeddings", "n_positions", "max_target_positions")
    )
    longest = next((each for each in limits if each), 512)
    labels = max(getattr(config, "num_labels", 2) or 2, 2)
    lines = {
        "VOCAB": f"VOCAB = {getattr(text, 'vocab_size', 0)}",
        "SEQ": f"SEQ = {min(longest, _LONGEST)}  {MARK} tokens of your longest sample, at most {longest}",
        "LABELS": f"LABELS = {labels}",
        "CHANNELS": f"CHANNELS = {getattr(config, 'num_channels', 3)}",
        "IMAGE": f"IMAGE = {_image_size(config)}",
        "MEL": f"MEL = {getattr(config, 'num_mel_bins', 0)}",
        "FRAMES": f"FRAMES = {2 * getattr(config, 'max_source_positions', 0)}",
        "SAMPLES": f"SAMPLES = 16000  {MARK} sound samples",
    }
    return tuple(line for name, line in lines.items() if name in used)


def _image_size(config: Any) -> int:
    size = getattr(config, "image_size", None) or 224
    return int(max(size)) if isinstance(size, list | tuple) else int(size)


def _differences(config: Any) -> dict[str, Any]:
    """Return the values of `config` that are not the defaults of its class."""
    defaults = type(config)().to_dict()
    return {
        key: value for key, value in config.to_dict().items() if key not in defaults or defaults[key] != value
    }

"""Full weights in one file of the safetensors format, one tensor at a time, so that no rank holds the whole
model.

The format (huggingface.co/docs/safetensors): eight bytes with the length of a header, the header in JSON
(name → type, shape, begin and end of its bytes after the header), the bytes.
"""

from __future__ import annotations

import json
import os
from contextlib import suppress
from os import PathLike
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from memtune.checkpointer.state_dict import full_value
from memtune.errors import EnvironmentFault
from memtune.runtime import Context

_TYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}
_NO_TYPE = "which the format does not have"


def export(context: Context, file: str | PathLike[str]) -> None:
    """Write the model's tensors in full and under their plain names; all ranks call it, rank 0 writes.

    Tied weights are written under each of their names. Entries that are no tensors (a module's extra state)
    are omitted.

    Raises:
        EnvironmentFault: Rank 0 could not write; then `file` is unchanged.
    """
    tensors = {name: value for name, value in context.model.state_dict().items() if isinstance(value, Tensor)}
    several = context.placement.world_size > 1
    failure = (
        _write(context, tensors, Path(file)) if context.placement.rank == 0 else _take_part(context, tensors)
    )
    failures: list[Any] = [failure]
    if several:
        dist.broadcast_object_list(failures)
    if failures[0]:
        raise EnvironmentFault(
            f"The weights could not be written to {file}.",
            evidence=f"{failures[0]}.",
            fix="tuned.save(folder), which keeps every type"
            if _NO_TYPE in failures[0]
            else "check space and permissions",
            code="MT375",
        )


def _take_part(context: Context, tensors: dict[str, Tensor]) -> str:
    for name, value in tensors.items():
        full_value(context, name, value)
    return ""


def _write(context: Context, tensors: dict[str, Tensor], file: Path) -> str:
    """Return the error message, '' for success; the other ranks' tensors are gathered in any case."""
    failure, partial = "", file.with_name(f"{file.name}.partial")
    remaining = iter(tensors.items())
    try:
        with partial.open("wb") as out:
            out.write(_header(context, tensors))
            for name, value in remaining:
                full = full_value(context, name, value).detach().cpu().contiguous()
                out.write(full.reshape(-1).view(torch.uint8).numpy().data)
            out.flush()
            os.fsync(out.fileno())  # else a crash after the rename could leave an empty file
        os.replace(partial, file)
    except (OSError, KeyError) as error:
        failure = f"a tensor has type {error}, {_NO_TYPE}" if isinstance(error, KeyError) else str(error)
        for name, value in remaining:
            full_value(context, name, value)
        with suppress(OSError):
            partial.unlink()
    return failure


def _header(context: Context, tensors: dict[str, Tensor]) -> bytes:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, value in tensors.items():
        shape = context.placement.absent.get(name, value.shape)
        end = at + shape.numel() * value.element_size()
        header[name] = {"dtype": _TYPES[value.dtype], "shape": list(shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text

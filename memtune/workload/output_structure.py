"""Structure of a block's output, as text: a pipeline stage recreates the output around the tensor received
from another stage.

The text is JSON: {"tensor": i} is the i-th of the tensors, lists and tuples are {"list": ...} and {"tuple":
...}, dictionaries {"dict": ...}; None, true, false and strings represent themselves, {"other": name} all
other values. A single tensor is the empty text.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeGuard

from memtune.workload.batches import tensors_of

if TYPE_CHECKING:
    from torch import Tensor

LONE = ""
"""A tensor by itself."""
_PLAIN = (bool, str, type(None))  # not numbers: they may depend on the batch, which other stages do not have


def structure_of(output: Any) -> str:
    """Return the structure of a block's output; holds no tensor."""
    if _is_tensor(output):
        return LONE
    return json.dumps(_structure(output, {}))


def _structure(output: Any, seen: dict[int, int]) -> Any:
    if _is_tensor(output):
        return {"tensor": seen.setdefault(id(output), len(seen))}
    if type(output) in _PLAIN:
        return output
    if type(output) in (list, tuple):
        return {type(output).__name__: [_structure(each, seen) for each in output]}
    if type(output) is dict and all(isinstance(key, str) for key in output):
        return {"dict": {key: _structure(each, seen) for key, each in output.items()}}
    return {"other": type(output).__name__}


def not_one_tensor(form: str) -> str:
    """Return the part of an output that cannot be sent to another stage; '' for one tensor among constants.

    Raises:
        ValueError: `form` is no such text.
    """
    if form == LONE:
        return ""
    leaves = list(_leaves(json.loads(form)))
    others = [leaf["other"] for leaf in leaves if "other" in leaf]
    if others:
        return f"an object of {others[0]}"
    count = len({leaf["tensor"] for leaf in leaves})
    return "" if count == 1 else f"{count} tensors"


def _leaves(form: Any) -> Iterator[dict[str, Any]]:
    """Yield the tensors and other values of a structure, in order."""
    if form is None or isinstance(form, bool | str):
        return
    match list(form.items()) if isinstance(form, dict) else []:
        case [("tensor", int())] | [("other", str())]:
            yield form
        case [("list" | "tuple", list(inside))]:
            for each in inside:
                yield from _leaves(each)
        case [("dict", dict(named))]:
            for each in named.values():
                yield from _leaves(each)
        case _:
            raise ValueError(f"{form!r} is not the structure of a block's output")


def wrap_tensor(form: str, tensor: Tensor) -> Any:
    """Return an output of structure `form`, which has one tensor, with `tensor` as that tensor."""
    return tensor if form == LONE else _wrap(json.loads(form), tensor)


def _wrap(form: Any, tensor: Tensor) -> Any:
    if not isinstance(form, dict):
        return form
    ((kind, inside),) = form.items()
    if kind == "tensor":
        return tensor
    if kind == "dict":
        return {key: _wrap(each, tensor) for key, each in inside.items()}
    made = [_wrap(each, tensor) for each in inside]
    return tuple(made) if kind == "tuple" else made


def require_structures(forms: Sequence[str], count: int) -> None:
    """Raise ValueError if `forms` are not those of the outputs of `count` blocks, or of none."""
    if forms and len(forms) != count:
        raise ValueError(f"{forms!r} are not the structures of the outputs of {count} blocks")
    try:
        for form in set(forms):
            # Parses only: blocks of the last stage may return anything, since no stage follows it.
            not_one_tensor(form)
    except RecursionError as error:
        raise ValueError("the structure of a block's output is nested too deeply") from error


def the_tensor(output: Any) -> Tensor:
    """Return the tensor in an output whose structure has one."""
    return output if _is_tensor(output) else tensors_of(output)[0]


def _is_tensor(value: Any) -> TypeGuard[Tensor]:
    """Return whether `value` is a tensor; imports torch here, since passes read the text forms without it."""
    import torch

    return isinstance(value, torch.Tensor)

"""What a block returns, as text: a stage of a pipeline makes the same again around the tensor that another one has sent.

The text is JSON: {"tensor": i} is the i-th of the tensors, lists and tuples are {"list": ...} and {"tuple": ...}, dictionaries
{"dict": ...}; None, true, false and strings stand for themselves, {"other": name} for all else. A lone tensor is the empty text.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from torch import Tensor

from memtune.batches import tensors_of

LONE = ""
"""A tensor by itself."""
_PLAIN = (bool, str, type(None))  # a number may follow from the batch, which other stages could not know


def form_of(output: Any) -> str:
    """The form of what a block has returned; holds no tensor."""
    if isinstance(output, Tensor):
        return LONE
    return json.dumps(_form(output, {}))


def _form(output: Any, seen: dict[int, int]) -> Any:
    if isinstance(output, Tensor):
        return {"tensor": seen.setdefault(id(output), len(seen))}
    if type(output) in _PLAIN:
        return output
    if type(output) in (list, tuple):
        return {type(output).__name__: [_form(each, seen) for each in output]}
    if type(output) is dict and all(isinstance(key, str) for key in output):
        return {"dict": {key: _form(each, seen) for key, each in output.items()}}
    return {"other": type(output).__name__}


def not_one_tensor(form: str) -> str:
    """What is returned that cannot be sent to another stage; '' for one tensor among constants.

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
            raise ValueError(f"{form!r} is no form of what a block returns")


def around(form: str, tensor: Tensor) -> Any:
    """What a block of `form`, which returns one tensor, returns with `tensor` in its place."""
    return tensor if form == LONE else _around(json.loads(form), tensor)


def _around(form: Any, tensor: Tensor) -> Any:
    if not isinstance(form, dict):
        return form
    ((kind, inside),) = form.items()
    if kind == "tensor":
        return tensor
    if kind == "dict":
        return {key: _around(each, tensor) for key, each in inside.items()}
    made = [_around(each, tensor) for each in inside]
    return tuple(made) if kind == "tuple" else made


def outputs_in(found: Any, count: int) -> tuple[str, ...]:
    """What a plan says of the outputs of `count` blocks; empty where it says nothing.

    Raises:
        ValueError: It is damaged.
    """
    if found is None:
        return ()
    if not (isinstance(found, list) and len(found) == count and all(isinstance(form, str) for form in found)):
        raise ValueError(f"{found!r} is not what {count} blocks return")
    try:
        for form in set(found):
            not_one_tensor(form)  # the last ones may return anything: no stage comes after theirs
    except RecursionError as error:
        raise ValueError("the form of what a block returns is nested too deep") from error
    return tuple(found)


def the_tensor(output: Any) -> Tensor:
    """The tensor in an output of a form that has one."""
    return output if isinstance(output, Tensor) else tensors_of(output)[0]

"""Steps of the other moments of a run, derived from the steady step: first step, evaluation, checkpoint.

- First step: optimizer state is allocated at the first update, and exists from then on.
- Evaluation: the forward of the sharded plain step under `model.eval()` and `torch.no_grad()`. Autograd saves
  nothing, so nothing is recomputed or offloaded, and dropout returns its input.
- Checkpoint: all-gathers of sharded parameters, then of sharded optimizer state; all are held until they are
  written.
"""

from __future__ import annotations

import numpy as np

from memtune.program.edit import Edit
from memtune.program.parameter_columns import columns_of
from memtune.program.step import FOREVER, I32, I64, READS, WRITES, Kind, Phase, Resource, Step, Tier

_DROPOUTS = ("aten.bernoulli_.", "aten.native_dropout.")
_OUTPUTS_IN_EVALUATION = {
    **dict.fromkeys(
        ("aten.native_batch_norm.default", "aten.cudnn_batch_norm.default", "aten.miopen_batch_norm.default"),
        1,
    ),
    **dict.fromkeys(("aten.mkldnn_rnn_layer.default", "aten._cudnn_rnn.default"), 3),
}
"""Op → number of outputs outside training; the others (batch statistics, reserves) serve backward."""


def first_step(step: Step) -> Step:
    """Return `step` as the first of a run: optimizer state is allocated just before the first update."""
    # An upper bound for optimizers that allocate a parameter's state at its own update (SGD's momentum):
    # there the temporaries of earlier parameters do not coincide with the state of later ones.
    return step.with_storages(producer=state_producers(step))


def state_producers(step: Step) -> I32:
    """Return (m,) the producer of each storage in the first step."""
    # torch's optimizers allocate the state of a whole parameter group before they update its first parameter.
    # An optimizer that updates parameters one by one inside backward allocates state per parameter.
    updates = np.flatnonzero(step.ops.phase == Phase.OPTIMIZER)
    state = (step.storages.kind == Kind.OPTIMIZER) & (step.storages.producer < 0)
    if not len(updates) or not state.any():
        return step.storages.producer
    begins = np.full(step.storages.n, updates[0], np.int32)
    if updates_inside_backward(step):
        used = np.flatnonzero(state[step.uses.storage] & (step.use_phase == Phase.OPTIMIZER))[::-1]
        begins[step.uses.storage[used]] = step.uses.op[used]  # reversed, so the first use is assigned last
    return np.where(state, begins, step.storages.producer).astype(np.int32)


def updates_inside_backward(step: Step) -> bool:
    """Return whether parameters are updated during backward."""
    updates = np.flatnonzero(step.ops.phase == Phase.OPTIMIZER)
    return bool(len(updates) and (step.ops.phase[updates[0] :] < Phase.BOUNDARY).any())


def evaluation(step: Step) -> Step:
    """Return the forward of `step`, rewritten by all passes but those of recompute and activations."""
    edit = Edit(step)
    unsaved = _without_dropout(edit, step)
    edit.drop_ops((step.ops.phase > Phase.FORWARD) | unsaved)
    edit.drop_saves(np.ones(step.saves.n, bool))
    edit.storages.bytes[
        (step.storages.kind == Kind.GRADIENT)
        & (step.storages.producer < 0)
        & (step.storages.held_until != FOREVER)
    ] = 0  # gradient sums of earlier micro-batches
    for name, count in _OUTPUTS_IN_EVALUATION.items():
        for op in (
            np.flatnonzero(step.ops.name == step.names.index(name)).tolist() if name in step.names else ()
        ):
            edit.storages.bytes[_made_by(step, op)[count:]] = 0
    return edit.done()


def _without_dropout(edit: Edit, step: Step) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    """Replace the output of every dropout by its input; return (n,) the ops that no longer run."""
    # On CPU a mask is allocated, drawn, scaled and multiplied with the input; on CUDA one op makes mask and
    # output.
    ops = np.zeros(step.ops.n, bool)
    replacement = np.arange(step.storages.n, dtype=np.int32)
    for mask, made, output, source in _dropouts(step):
        ops[step.storages.producer[[mask, output]]] = True
        ops[step.uses.op[(step.uses.storage == mask) & (step.uses.op <= made)]] = True
        replacement[output] = replacement[source]  # dropouts may follow one another
    replaced = np.flatnonzero(replacement != np.arange(step.storages.n))
    np.maximum.at(
        edit.storages.held_until,
        replacement[replaced],
        np.minimum(step.storages.held_until[replaced], step.ops.n - 1),
    )
    edit.set_uses(storage=replacement[step.uses.storage])
    return ops


def _dropouts(step: Step) -> list[tuple[int, int, int, int]]:
    """Return mask, op that makes the output, output and input of every dropout in forward."""
    found = []
    draws = np.asarray([name.startswith(_DROPOUTS) for name in step.names], bool)
    for op in np.flatnonzero(draws[step.ops.name] & (step.ops.phase == Phase.FORWARD)).tolist():
        used = step.uses.op == op
        drawn = step.uses.storage[used & (step.uses.mode == WRITES)]
        if len(drawn) == 1:  # bernoulli_
            mask = int(drawn[0])
            readers = step.uses.op[(step.uses.storage == mask) & (step.uses.op > op)]
            made = next((int(r) for r in readers if len(_made_by(step, int(r)))), -1)
        else:
            made, outputs = op, _made_by(step, op)
            mask = int(outputs[-1]) if len(outputs) == 2 else -1
        if made < 0 or mask < 0 or step.storages.producer[mask] < 0:
            continue
        inputs = step.uses.storage[
            (step.uses.op == made) & (step.uses.storage != mask) & (step.uses.mode == READS)
        ]
        if len(inputs):
            found.append((mask, made, int(_made_by(step, made)[0]), int(inputs[0])))
    return found


def _made_by(step: Step, op: int) -> I32:
    return np.flatnonzero((step.storages.producer == op) & (step.storages.kind != Kind.WORKSPACE)).astype(
        np.int32
    )


def checkpoint(step: Step, *, parameters: int, optimizer: int, stages_messages: bool, uploads: bool) -> Step:
    """Return the step of `Tuned.state_dict()` between two steps: full tensors on the device of every rank.

    Args:
        step: The rewritten step; storages that outlive it are live.
        parameters: Ranks over which parameters are sharded, 1 for none.
        optimizer: Ranks over which optimizer state is sharded, 1 for none.
        stages_messages: Collectives copy their whole message first (gloo).
        uploads: State on the host is copied to the device to be gathered (CUDA).
    """
    edit = Edit(step)
    edit.drop_ops(np.ones(step.ops.n, bool))
    edit.drop_saves(np.ones(step.saves.n, bool))
    edit.storages.bytes[(step.storages.producer < 0) & (step.storages.held_until != FOREVER)] = 0
    edit.add_ops(
        "memtune.state_dict",
        before=np.asarray([step.ops.n], np.int32),
        phase=Phase.BOUNDARY,
        resource=Resource.NOTHING,
    )
    shards = np.concatenate([_parameters(step, parameters), _state(step, optimizer)]).astype(np.int32)
    if not len(shards):
        return edit.done()
    ranks = np.where(step.storages.kind[shards] == Kind.OPTIMIZER, optimizer, parameters)
    # Uneven shards are padded; the padding stays in the gathered buffer.
    whole: I64 = step.storages.bytes[shards] * ranks
    gathers = edit.add_ops(
        "c10d.all_gather_into.default",
        before=np.full(len(shards), step.ops.n, np.int32),
        phase=Phase.BOUNDARY,
        resource=Resource.INTRA_LINK,
        traffic_bytes=whole,
        group=int(max(parameters, optimizer)),
        reads=shards,
    )
    held = np.full(len(shards), FOREVER, np.int32)
    edit.add_storages(whole, producer=gathers, kind=step.storages.kind[shards], held_until=held)
    if stages_messages:
        edit.add_storages(whole, producer=gathers, kind=Kind.WORKSPACE)
    if uploads:
        on_host = step.storages.tier[shards] == Tier.HOST
        edit.add_storages(
            step.storages.bytes[shards[on_host]], producer=gathers[on_host], kind=Kind.COMMUNICATION
        )
    return edit.done()


def _parameters(step: Step, ranks: int) -> I32:
    """Return the sharded parameters, in the order of the state dict."""
    return columns_of(step.parameters).storage if ranks > 1 else np.empty(0, np.int32)


def _state(step: Step, ranks: int) -> I32:
    """Return optimizer state that is sharded with its parameter, in parameter order; not step counters."""
    if ranks == 1:
        return np.empty(0, np.int32)
    columns = columns_of(step.parameters)
    states = np.flatnonzero(
        (step.storages.kind == Kind.OPTIMIZER) & (step.storages.owner >= 0) & (step.storages.producer < 0)
    ).astype(np.int32)
    numel = columns.numel[step.storages.owner[states]]
    sharded = states[
        (step.storages.bytes[states] % np.maximum(numel, 1) == 0) & (step.storages.bytes[states] >= numel)
    ]
    ordered: I32 = sharded[np.argsort(step.storages.owner[sharded], kind="stable")]
    return ordered

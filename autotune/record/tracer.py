"""Record one training step, op by op, as a Step.

Invariants:

1. Storages are counted, not tensors. A storage is created by the first op that returns it (or when FSDP2
  resizes it from zero) and freed when its last reference dies, which a finaliser reports at once.
2. Every tensor that autograd saves is replaced by a placeholder in memory of its own (`_pack`). The death of
  the real storage then shows when *Python* released it, the death of the placeholder when *autograd* did, so
  that a pass can remove one hold without the other.
3. A backward op belongs to the module of the forward op whose autograd node has its sequence number.
"""

from __future__ import annotations

import bisect
import contextlib
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.modules import module as module_hooks
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from memtune._replaced import replaced
from memtune.activations.offload import is_written_part
from memtune.autotune.record.fake_divergence import watch_random_states
from memtune.autotune.record.inplace_accumulation import SUM, is_in_place, sequence_number
from memtune.autotune.record.kernel_traffic import kernel_traffic_bytes
from memtune.autotune.record.precision import precision_of
from memtune.autotune.record.step_builder import Draft, Mark, OpRow, SaveRow
from memtune.hardware import flops
from memtune.memory import FAKE_DEVICE, signature
from memtune.program import (
    DONATES,
    FOREVER,
    OWN_GENERATOR,
    READS,
    WRITES,
    Kind,
    Parameter,
    Phase,
    Resource,
    Step,
    Tier,
)
from memtune.progress import advance
from memtune.runtime import (
    DEVICE,
    HOST,
    READ_OUTS,
    SEAM,
    TIERS,
    PythonDraws,
    SeamOp,
    WatchingMode,
    current_tier,
    draws,
    element_bytes,
    group_size,
    link_of,
    mutated,
    observe_kept,
    one_pass_bytes,
    spent_as_none,
    tensors_in,
    tier,
    tier_of_storage,
    weakly,
)
from memtune.workload import structure_of

_OPS_PER_REPORT = 256
_COLLECTIVES = ("c10d.", "_c10d_functional.")
_CASTS = ("aten._to_copy.default", "prims.convert_element_type.default")
_LIFT = torch.ops.aten.lift_fresh.default
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_EndOfSave = Literal["held_until", "used_until"]


class Tracer(WatchingMode):
    """Dispatch mode that records every op inside `recording`; `step` builds the Step.

    Args:
        model: The model as it is trained, wrapped or not.
        optimizer: Its optimizer; its state when the recording starts is that of a steady-state step.
        blocks: Qualified names of the repeated blocks.
        placeholders: Replace saved tensors (rule 2). Otherwise references of autograd and Python are not
            distinguished.
        on_cpu: The step is to run on CPU, where generator states that the model keeps are device memory.
        device_type: Of the model. Tensors on the CPU are host memory for any other.
        on_save: Called with each tensor that autograd saves or reads, and its placeholder.

    Attributes:
        draft: The rows recorded so far.
        n_state: Number of storages that existed when the recording began.
        entered: Position of the recording when each block was first called.
        composite_from: First op of the running function of `PRODUCT_PLUS_BIAS`, -1 outside of one.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        blocks: list[str],
        *,
        placeholders: bool = True,
        on_cpu: bool = True,
        device_type: str = "cpu",
        on_save: Callable[[Tensor, Tensor], None] = lambda tensor, placeholder: None,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._model, self._optimizer, self._placeholders = model, optimizer, placeholders
        self._on_save = on_save
        self._blocks, self._on_cpu, self._device_type = blocks, on_cpu, device_type
        self.draft = Draft(blocks)
        self.n_state = 0
        self._drawn: PythonDraws | None = None
        self.entered: dict[int, Mark] = {}
        self.phase = Phase.FORWARD
        self._paused = 0
        self._states: list[int] = []  # generator states kept since the model's last op
        self.composite_from = -1
        self._unpack_count = 0
        self._ids: dict[int, int] = {}  # storage address -> id, for real storages and for placeholders
        self._sequence = -1  # autograd's counter when the last op ran
        self._row_of: dict[int, int] = {}  # placeholder's storage address -> row of the saves
        self._module_names = {id(module): name for name, module in model.named_modules()}
        self._block_of = {id(model.get_submodule(name)): i for i, name in enumerate(blocks)}
        self._stack: list[tuple[int, int]] = [(0, -1)]  # module, call of a block
        # autograd sequence number -> (module, call), ascending
        self._node_owner: dict[int, tuple[int, int]] = {}
        self._nodes: list[int] = []  # the keys of _node_owner
        self._last_writer: dict[int, int] = {}  # storage that backward wrote into -> the last op that did
        # Weak: finalizers of the model's storages outlive the step and must not keep the tracer alive.
        self._on_death, self._on_release = weakly(self._died), weakly(self._released)

    # -- state before the step -------------------------------------------------------------------------------

    def _register_state(self) -> None:
        seen: dict[int, int] = {}
        owners = self._owning_blocks()
        for name, parameter in self._model.named_parameters():
            local = _local(parameter)
            storage = self._register(local, Kind.PARAMETER)
            # Tied parameters are one storage and count once, under the first name.
            if storage in seen:
                continue
            seen[storage] = len(self.draft.parameters)
            shape = tuple(local.shape)
            self.draft.parameters.append(
                Parameter(
                    name,
                    storage,
                    -1,
                    shape,
                    local.element_size(),
                    parameter.requires_grad,
                    owners.get(id(parameter), -1),
                )
            )
        for buffer in self._model.buffers():
            self._register(_local(buffer), Kind.BUFFER)
        for state in self._optimizer.state.values():
            for value in tree_leaves(state):
                if isinstance(value, Tensor):
                    self._register(_local(value), Kind.OPTIMIZER)
        # Parameters that only the optimizer holds: master copies on the host.
        for group in self._optimizer.param_groups:
            for parameter in group["params"]:
                self._register(_local(parameter), Kind.PARAMETER)

    def _owning_blocks(self) -> dict[int, int]:
        return {
            id(parameter): i
            for i, name in enumerate(self._blocks)
            for parameter in self._model.get_submodule(name).parameters()
        }

    def _register(self, tensor: Tensor, kind: Kind) -> int:
        storage = tensor.untyped_storage()
        known = self._ids.get(storage._cdata)
        return known if known is not None else self._new_storage(storage, kind, -1, _float_bytes(tensor))

    def _new_storage(
        self, storage: torch.UntypedStorage, kind: Kind, producer: int, float_bytes: int = 0
    ) -> int:
        place = tier_of_storage(storage)
        if place == DEVICE:
            is_on_host = self._device_type != "cpu" and storage.device.type == "cpu"
            place = HOST if is_on_host else current_tier()
        index = self.draft.add(
            storage.nbytes(), Tier(TIERS.index(place)), kind, producer, float_bytes=float_bytes
        )
        self._ids[storage._cdata] = index
        # On the storage, not the tensor: views keep it alive after the tensor has died.
        weakref.finalize(storage, self._on_death, storage._cdata, index)
        return index

    def _died(self, address: int, index: int) -> None:
        # FSDP2 resizes a storage to zero and back: the address then belongs to a later row, whose life ends
        # here.
        current = self._ids.pop(address, index)
        # Once only: `resized` has set the end of a storage that FSDP2 freed.
        if self.draft.held[current] == FOREVER:
            self.draft.held[current] = len(self.draft.ops) - 1

    def storage_of(self, tensor: Tensor) -> int:
        """Return the row of the storage behind `tensor`."""
        return self._register(_local(tensor), Kind.BUFFER)

    def adopt(self, tensor: Tensor, kind: Kind) -> None:
        """Count the storage of `tensor` among those that existed before the step."""
        self._register(_local(tensor), kind)

    def mark(self) -> Mark:
        """Return the current position of the recording."""
        return Mark(len(self.draft.ops), torch._C._autograd._get_sequence_nr(), len(self.draft.saves))

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Do not record ops inside."""
        self._paused += 1
        # Ops on placeholders are the recorder's own.
        try:
            yield
        finally:
            self._paused -= 1

    # -- while the step runs ---------------------------------------------------------------------------------

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # About every second call reads a fake tensor's device; answering here saves the other dispatch modes.
        if func is FAKE_DEVICE and type(args[0]) is FakeTensor:
            return args[0].fake_device
        if any(
            kind not in (Tensor, nn.Parameter, FakeTensor) and hasattr(kind, "__torch_dispatch__")
            for kind in types
        ):
            if not all(issubclass(kind, FakeTensor | nn.Parameter) or kind is Tensor for kind in types):
                return NotImplemented  # DTensor dispatches its local op, which is recorded with local shapes
        # Read before the op runs: the node of this op was made already, below this mode.
        sequence = torch._C._autograd._get_sequence_nr() - 1
        out = func(*args, **(kwargs or {}))
        if self._paused or func.namespace == "prim":
            return out
        self._record(func, sequence, args, kwargs or {}, out)
        return out

    def _record(self, func: Any, sequence: int, args: Any, kwargs: Any, out: Any) -> None:
        # `torch.tensor` has just made what it lifts: that is no input, of a fake tensor it is a real twin.
        inputs = [] if func is _LIFT else [*tensors_in(args), *tensors_in(tuple(kwargs.values()))]
        outputs = tensors_in((out,))
        written = mutated(func, args, kwargs)
        known = {t.untyped_storage()._cdata for t in inputs}
        # The first op after the node was made is the one it belongs to; later ones made none.
        if torch._C._current_autograd_node() is None and sequence not in self._node_owner:
            self._node_owner[sequence] = self._stack[-1]
        fresh = [
            t
            for t in outputs
            if t.untyped_storage()._cdata not in self._ids and t.untyped_storage()._cdata not in known
        ]
        if not fresh and not written:  # a view, or a read of a value (`.item()`)
            if func in READ_OUTS and self._inside_model():
                self._note_host_read(inputs)
            return
        if self.phase < Phase.BOUNDARY and any(t.is_conj() or t.is_neg() for t in inputs):
            self.draft.lazy_values = True
        self._sequence = _sequence_when_saved(sequence, inputs, written)
        op = len(self.draft.ops)
        reads = [self._register(t, Kind.BUFFER) for t in inputs]
        module, call, phase = self._place(sequence)
        donated = reads[0] if reads and self._is_in_place(func, args, out, reads[0], phase) else -1
        self._note_uses(op, reads, donated, written, phase)
        name = str(func)
        node: Any = torch._C._current_autograd_node()
        seam = SEAM.get(name)
        resource, group = _resource_of(func, name, seam, args, kwargs)
        if seam or group:
            traffic_bytes = _seam_traffic_bytes(seam, inputs, fresh, written)
        else:
            in_place = donated >= 0 or bool(written)
            traffic_bytes = kernel_traffic_bytes(
                name, inputs, outputs, in_place=in_place, on_cpu=self._on_cpu
            )
        has_generator = any(isinstance(each, torch.Generator) for each in (*args, *kwargs.values()))
        self.draft.ops.append(
            OpRow(
                name,
                module,
                call,
                int(phase),
                int(resource),
                flops.count(func, args, kwargs, out),
                traffic_bytes,
                rng=OWN_GENERATOR if has_generator else int(draws(func, args, kwargs)),
                group=group,
                sequence_nr=-1 if node is None or phase is not Phase.BACKWARD else sequence_number(node),
                elementwise_bytes=element_bytes(func, args, kwargs, out),
                # It selects the rate of an accelerator's matrix products, and the optimizer has none.
                precision=0
                if self._on_cpu or phase >= Phase.BOUNDARY
                else precision_of(name, inputs, outputs),
            )
        )
        if len(self.draft.ops) % _OPS_PER_REPORT == 0:
            advance(len(self.draft.ops), "ops")
        self.draft.signatures.append("" if seam or group else signature(func, args, kwargs))
        while self._states and not seam:
            self.draft.producer[self._states.pop()] = op
        self._note_outputs(op, fresh, seam)

    def _note_uses(
        self, op: int, reads: list[int], donated: int, written: list[Tensor], phase: Phase
    ) -> None:
        """Add the storages that `op` reads, may reuse for its output (`donated`, -1 for none), and writes."""
        for storage in dict.fromkeys(reads):
            self.draft.uses.append((op, storage, DONATES if storage == donated else READS))
        for tensor in written:
            self.draft.uses.append((op, self._register(tensor, Kind.BUFFER), WRITES))
            if phase is Phase.BACKWARD:
                self._last_writer[self.draft.uses[-1][1]] = op

    def _note_outputs(self, op: int, fresh: list[Tensor], seam: SeamOp | None) -> None:
        """Add the storages that `op` has made, on the tier of its operator."""
        # Outside of the model only the loop uploads tensors: they are the batch.
        uploads = self.draft.ops[op].name == "memtune.to_device.default" and not self._inside_model()
        kind = Kind.BATCH if uploads else Kind.TEMPORARY
        for tensor in fresh:
            made = tensor.untyped_storage()
            if made._cdata in self._ids:  # an earlier output of this op has the same storage
                continue
            width = 0 if self._casts_weight(op) else _float_bytes(tensor)
            index = self._new_storage(made, kind, op, width)
            if seam and seam.output_tier != Tier.DEVICE:
                self.draft.tier[index] = int(seam.output_tier)

    def _casts_weight(self, op: int) -> bool:
        """Return whether `op`, whose uses were noted last, is autocast's cast of a parameter."""
        return self.draft.ops[op].name in _CASTS and self.draft.kind[self.draft.uses[-1][1]] == Kind.PARAMETER

    def _note_host_read(self, tensors: list[Tensor]) -> None:
        """Record that model code read a value of `tensors`."""
        # Storages that are neither an op's output nor a parameter or buffer are constants of the code, and
        # are skipped.
        known = [self._ids.get(_local(each).untyped_storage()._cdata, -1) for each in tensors]
        self.draft.host_reads.update(
            each for each in known if self.draft.producer[each] >= 0 or 0 <= each < self.n_state
        )

    def _is_in_place(self, func: Any, args: Any, out: Any, first: int, phase: Phase) -> bool:
        maker = self._last_writer.get(first, self.draft.producer[first])
        if phase is Phase.BACKWARD:
            if maker < 0:
                return False
            made_by = self.draft.ops[maker]
            return is_in_place(func, args, out, made_by.name, made_by.sequence_nr)
        return func is SUM and maker >= self.composite_from >= 0

    def _inside_model(self) -> bool:
        return len(self._stack) > 1 or torch._C._current_autograd_node() is not None

    def _place(self, sequence: int) -> tuple[int, int, Phase]:
        if self.phase is not Phase.FORWARD:
            return 0, -1, self.phase
        node: Any = torch._C._current_autograd_node()
        if node is None:
            return *self._stack[-1], Phase.FORWARD
        owner = self._owner_of(node._sequence_nr())
        # Forward ops inside backward are a recompute, of the block whose backward requested it.
        if torch.is_grad_enabled():
            module, call = self._stack[-1]
            return module or owner[0], call if call >= 0 else owner[1], Phase.RECOMPUTE
        return *owner, Phase.BACKWARD

    def _owner_of(self, node: int) -> tuple[int, int]:
        """Return module and call of the forward op that made a node."""
        # Writing into a view makes more nodes than ops, numbered after the op's own, so the nearest lower
        # number is taken.
        if len(self._nodes) != len(self._node_owner):
            self._nodes = sorted(self._node_owner)
        at = bisect.bisect_right(self._nodes, node) - 1
        return self._node_owner[self._nodes[at]] if at >= 0 else (0, -1)

    def resized(self, storage: torch.UntypedStorage, before: int, after: int) -> None:
        """Record that FSDP2 freed (`after` 0) or reallocated (`before` 0) a storage in place."""
        index = self._ids.get(storage._cdata)
        if self._paused or before == after:
            return
        if index is not None and before > 0:
            self.draft.held[index] = len(self.draft.ops) - 1
        if after > 0:
            op = self._allocates(*self._stack[-1], self.phase)
            self._ids[storage._cdata] = self.draft.add(after, Tier.DEVICE, Kind.COMMUNICATION, producer=op)

    def _allocates(self, module: int, call: int, phase: Phase) -> int:
        """Append an op that represents memory allocated without an op; return its row."""
        self.draft.ops.append(OpRow("memtune.allocate", module, call, int(phase), int(Resource.NOTHING)))
        self.draft.signatures.append("")
        return len(self.draft.ops) - 1

    def _note_model_generator_state(self, state: Tensor) -> None:
        """Record a generator state that the model's own checkpoint keeps: kilobytes without an op."""
        if not self._paused and current_tier() == DEVICE:
            op = self._allocates(*self._place(torch._C._autograd._get_sequence_nr() - 1))
            self._new_storage(state.untyped_storage(), Kind.TEMPORARY, producer=op)

    def _note_runtime_generator_state(self, state: Tensor) -> None:
        """Record a generator state that memtune's runtime keeps."""
        # It is counted from the model's next op, because copies before that op are not part of the block.
        if not self._paused:
            with tier(HOST):
                index = self._new_storage(
                    state.untyped_storage(), Kind.TEMPORARY, producer=len(self.draft.ops)
                )
            self._states.append(index)

    def _pack(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        index = self._ids.get(storage._cdata)
        self._paused += 1
        try:
            if index is None:
                index = self._register(tensor, Kind.BUFFER)
            # State outlives the step anyway; autograd's hold on it changes no lifetime.
            if self.draft.kind[index] in (Kind.PARAMETER, Kind.BUFFER) and self.draft.producer[index] < 0:
                return tensor
            base = tensor._base if tensor._is_view() else tensor
            if isinstance(base, nn.Parameter) or self.draft.kind[index] == Kind.COMMUNICATION:
                return tensor
            if is_written_part(tensor):
                self.draft.parts.add(index)
            row = len(self.draft.saves)
            call = self._stack[-1][1]
            # An op saves its inputs after its autograd node is made and before it runs, its outputs after it
            # has run.
            is_output = torch._C._autograd._get_sequence_nr() <= self._sequence
            self.draft.saves.append(SaveRow(index, len(self.draft.ops), call, is_output))
            return self._new_placeholder(tensor, row, "held_until")
        finally:
            self._paused -= 1

    def _unpack(self, placeholder: Tensor) -> Tensor:
        # A second placeholder: it dies when the backward node has used it, the first one when autograd
        # releases the node.
        row = self._row_of.get(placeholder.untyped_storage()._cdata)
        if row is None:
            return placeholder
        save = self.draft.saves[row]
        if save.unpacked_before < 0:
            save.unpacked_before, save.unpack_order = len(self.draft.ops), self._unpack_count
            self._unpack_count += 1
        self._paused += 1
        try:
            return self._new_placeholder(placeholder, row, "used_until")
        finally:
            self._paused -= 1

    def _new_placeholder(self, tensor: Tensor, row: int, column: _EndOfSave) -> Tensor:
        """Return a placeholder for `tensor`, whose death sets `column` of the save in `row`."""
        placeholder = placeholder_like(tensor)
        self._on_save(tensor, placeholder)
        twin = placeholder.untyped_storage()
        self._ids[twin._cdata] = self.draft.saves[row].storage
        self._row_of[twin._cdata] = row
        weakref.finalize(twin, self._on_release, twin._cdata, row, column)
        return placeholder

    def _released(self, address: int, row: int, column: _EndOfSave) -> None:
        self._ids.pop(address, None)
        self._row_of.pop(address, None)
        setattr(self.draft.saves[row], column, len(self.draft.ops) - 1)

    # -- start and finish ------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def recording(self) -> Iterator[Tracer]:
        """Record everything that runs inside; the optimizer's `step` is the optimizer phase."""
        self._register_state()
        self.n_state = len(self.draft.bytes)
        enter = module_hooks.register_module_forward_pre_hook(self._enter)
        leave = module_hooks.register_module_forward_hook(self._leave, always_call=True)
        before = self._optimizer.register_step_pre_hook(lambda *_: setattr(self, "phase", Phase.OPTIMIZER))
        saved = torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)
        with contextlib.ExitStack() as stack:
            grad_hooks = [
                p.register_post_accumulate_grad_hook(self._on_grad_ready)
                for p in self._model.parameters()
                if p.requires_grad
            ]
            watched = [*(self._model.get_submodule(name) for name in self._blocks), self._model]
            called = [
                handle
                for i, module in enumerate(watched)
                for handle in (
                    module.register_forward_pre_hook(self._called(i), with_kwargs=True, prepend=True),
                    module.register_forward_hook(self._returned(i), prepend=True),
                )
            ]
            # After the user's hooks, which may change the output.
            called += [
                each.register_forward_hook(self._on_block_output(i)) for i, each in enumerate(watched[:-1])
            ]
            for handle in (enter, leave, before, *grad_hooks, *called):
                stack.callback(handle.remove)
            stack.enter_context(watch_resizes(self.resized))
            if self._on_cpu:
                stack.enter_context(watch_random_states(self._note_model_generator_state))
            stack.enter_context(observe_kept(self._note_runtime_generator_state))
            if self._placeholders:
                stack.enter_context(saved)
            stack.enter_context(self)
            yield self

    def _called(self, block: int) -> Callable[..., None]:
        def note(module: nn.Module, args: Any, kwargs: Any) -> None:
            if torch._C._current_autograd_node() is not None:
                return
            if self.draft.enter[block] < 0:
                self.draft.enter[block] = len(self.draft.ops)
                self.entered[block] = self.mark()
            if block == len(self._blocks):
                self.draft.model_calls += 1
                self._drawn = PythonDraws(module)
                return
            for tensor in tree_leaves((args, kwargs)):
                if isinstance(tensor, Tensor):
                    self.draft.inputs[self._stack[-1][1], self._register(_local(tensor), Kind.BUFFER)] = None

        return note

    def _returned(self, block: int) -> Callable[..., None]:
        def note(module: nn.Module, args: Any, output: Any) -> None:
            if torch._C._current_autograd_node() is None:
                self.draft.leave[block] = len(self.draft.ops) - 1
                if block == len(self._blocks):
                    self.draft.python_draws |= self._drawn is not None and self._drawn.some()
                    # Reading a lazy output (tiled logits that do not exist yet) would compute it.
                    with torch._C.DisableTorchFunctionSubclass():
                        storages = [
                            _local(t).untyped_storage() for t in tree_leaves(output) if isinstance(t, Tensor)
                        ]
                    self.draft.outputs |= {
                        self._ids[each._cdata] for each in storages if each._cdata in self._ids
                    }

        return note

    def _on_block_output(self, block: int) -> Callable[..., None]:
        def note(module: nn.Module, args: Any, output: Any) -> None:
            if torch._C._current_autograd_node() is None:
                self.draft.output_structures[block] = structure_of(output)

        return note

    def _on_grad_ready(self, parameter: Tensor) -> None:
        if parameter.grad is not None:
            index = self._ids.get(_local(parameter.grad).untyped_storage()._cdata)
            if index is not None:
                self.draft.ready[index] = len(self.draft.ops) - 1

    def _enter(self, module: nn.Module, args: Any) -> None:
        name = self._module_names.get(id(module), "")
        number = self.draft.modules.setdefault(name, len(self.draft.modules))
        block = self._block_of.get(id(module), -1)
        self._stack.append((number, self.draft.calls.enter(block) if block >= 0 else self._stack[-1][1]))

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        self._stack.pop()

    def note_gradients(self) -> None:
        """Mark gradients and link them to their parameters; call it between backward and optimizer."""
        by_name = dict(self._model.named_parameters())
        with spent_as_none():  # in a dry run, updates inside backward have used some
            gradients = {name: parameter.grad for name, parameter in by_name.items()}
        for i, parameter in enumerate(self.draft.parameters):
            gradient = gradients[parameter.name]
            if gradient is None:
                continue
            index = self._ids.get(_local(gradient).untyped_storage()._cdata, -1)
            if index >= 0:
                self.draft.kind[index] = Kind.GRADIENT
                self.draft.parameters[i] = parameter._replace(gradient=index)

    def step(self) -> Step:
        """Build the Step recorded so far and check its invariants."""
        return self.draft.step()


def _sequence_when_saved(sequence: int, inputs: list[Tensor], written: list[Tensor]) -> int:
    """Return autograd's sequence number when an op's output is saved; -1 where autograd records nothing."""
    # An op inside a custom Function's forward makes no node: what the Function saves when it returns is not
    # the output of a kernel that still runs.
    if not torch.is_grad_enabled():
        return -1
    # Writing into a view makes nodes for base and view before the output is saved.
    writes_view = any(t._is_view() for t in written) and any(t.requires_grad for t in inputs)
    return sequence + (3 if writes_view else 1)


def _float_bytes(tensor: Tensor) -> int:
    """Return `Storages.float_bytes` of a storage that is allocated for `tensor`."""
    return tensor.element_size() if tensor.dtype in _FLOATS else 0


def _resource_of(func: Any, name: str, seam: SeamOp | None, args: Any, kwargs: Any) -> tuple[Resource, int]:
    """Return the resource of an op, and of a collective the size of its group, else 0."""
    if name.startswith(_COLLECTIVES) or (seam and seam.collective):
        # Torch's own collectives name no nodes; the simulator places them by the size of their group.
        return link_of(func, args) if seam else Resource.INTRA_LINK, group_size(args, kwargs)
    return seam.resource if seam else Resource.COMPUTE, 0


def _seam_traffic_bytes(
    seam: SeamOp | None, inputs: list[Tensor], fresh: list[Tensor], written: list[Tensor]
) -> int:
    """Return the bytes that an operator of the seam, or a collective, moves over its link or memory."""
    if seam is not None and seam.resource in (Resource.HOST_THREADS, Resource.COMPUTE):
        return one_pass_bytes(inputs, written)
    moving = inputs[:1] if seam is not None and seam.first_crosses else inputs + fresh
    # The largest: a copy has its bytes at both ends, a collective's buffers hold each other's parts.
    return max([t.nbytes for t in moving], default=0)


def _local(tensor: Tensor) -> Tensor:
    """Return the tensor with the memory: of a DTensor, and of what `torch.func` passes to modules."""
    while torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    local: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return local


@contextmanager
def watch_resizes(note: Callable[[torch.UntypedStorage, int, int], None]) -> Iterator[None]:
    """Call `note` with every storage that is resized inside, and its bytes before and after."""
    # FSDP2 frees and reallocates storages in place, without an op that a dispatch mode would see.
    original = torch.UntypedStorage.resize_

    def resize_(self: torch.UntypedStorage, size: int) -> Any:
        before = self.nbytes()
        result = original(self, size)
        note(self, before, self.nbytes())
        return result

    with replaced(torch.UntypedStorage, resize_=resize_):
        yield


def placeholder_like(tensor: Tensor) -> Tensor:
    """Return a tensor of `tensor`'s layout in a storage of its own, for autograd to save."""
    # Placeholders of real tensors have their values, because backward computes with them.
    if type(tensor) is FakeTensor:
        # Below all modes, each of which would take microseconds per saved tensor.
        with torch._C._DisableTorchDispatch():
            empty = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
        return FakeTensor(tensor.fake_mode, empty, tensor.fake_device)
    with torch.no_grad(), torch.utils._python_dispatch._disable_current_modes():
        whole = tensor.untyped_storage().clone()
        return torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(
            whole, tensor.storage_offset(), tensor.shape, tensor.stride()
        )

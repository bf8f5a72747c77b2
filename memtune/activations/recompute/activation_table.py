"""The activation table: decides which saved tensors are kept, recomputed, offloaded or compressed.

Techniques for recompute and for activation offload both write claims here, so they compose: under full
recompute with offload, the blocks' inputs are offloaded. A claim names a `SavedTensorPolicy` (room
`program`), whose operators this table calls. A *region* is a block of the model. While its forward runs, each
tensor that autograd saves passes through `_Frame.pack` (`torch.autograd.graph.saved_tensors_hooks`):

Rule 1. Parameters and buffers are saved unchanged: sharding frees and refills them in place.
Rule 2. The inputs of the region, and the outputs that a recompute technique keeps, are *claimable*: they are
saved unchanged or offloaded to the host. In a region that is not recomputed, every saved tensor is claimable.
Rule 3. Every other saved tensor is replaced by a number. The first number that backward unpacks runs the
region's forward again, with the random state, autocast and inputs of the first run, up to the last tensor
that autograd still holds. Each recomputed tensor is returned once.
Rule 4. A buffer that the forward changes is restored after the second run. The second run starts with the
buffer's values from before the first run (spectral norm's vectors, a codebook's averages), except for the
statistics that PyTorch's norms only write.
Rule 5. A kept tensor that is changed in place after it was kept is dropped, and its op runs again.
Rule 6. A copy to the host holds its source until the first of these: the next copy starts, the forward of
another call of a region ends, the forward of the last region ends, backward fetches a tensor. So one copy is
in flight at most, and the moment when its source is freed does not depend on timing. With `out_at_once` up to
that many copies are in flight. Calls under `no_grad`, or in a checkpoint of the user's own, do not count.
Rule 7. A tensor that is spilled to SSD is written from host memory (`activations.offload.ssd_spill`).
Rule 8. A tensor is reloaded when backward unpacks it, or prefetched before (`activations.offload.prefetch`).
Rule 9. On a pipeline stage only the outputs of the stage's own blocks are offloaded, and copies may follow
the schedule (`activations.offload.pipeline_slots`).
Rule 10. The offloaded bytes meet the claimed share exactly (`activations.offload.selection_plan`): at the
end of a region's call the last tensor that was kept is cut; the missing bytes are offloaded and the rest gets
memory of its own. Each storage is decided once, by the first region that saves it.
Rule 11. A policy without copies (`compress`) packs a storage when it is saved, in the order of compute: its
source is freed with its last reader. It packs floating-point storages alone, and no statistics
(`Hop.least_bytes`). A region whose inputs are not packed exactly does not compare the values of both runs.

The pass `activations.recompute.recompute_pass` mirrors Rules 1 to 5,
`activations.offload.activation_offload_pass` Rules 2, 6, 10 and 11.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from memtune.activations.offload import (
    ByteShare,
    OffloadedTensor,
    OwnOutputs,
    Prefetcher,
    SavedStorage,
    Slots,
    SSDSpill,
    id_of,
)
from memtune.activations.recompute.call_moves import CallMoves, detached, unpack
from memtune.activations.recompute.collective_guard import (
    RefuseExchanges,
    is_on_ranks,
    needs_visitor,
    refused_in,
)
from memtune.activations.recompute.fingerprint import (
    Fingerprint,
    Fingerprinter,
    QuickFingerprint,
    QuickFingerprinter,
    first_op,
    magnitude,
)
from memtune.activations.recompute.region import Region as Region, Traffic
from memtune.activations.recompute.region_contract import RegionRun
from memtune.activations.recompute.saved_outputs import (
    Keep,
    KeepOutputs,
    KeptByStorage,
    ReplayOutputs,
    SkippedCalls,
)
from memtune.activations.recompute.second_forward import (
    CallArguments,
    Replay,
    StopReplay,
    as_input,
    is_plain,
    once_each,
    refuse_unpack,
)
from memtune.activations.recompute.user_checkpoint import autograd_saves
from memtune.errors import ApplyError
from memtune.program import OFFLOAD, RECOMPUTE, OpAddress, SavedTensorPolicy
from memtune.refusals import error_of, inside_torch_func
from memtune.runtime import BetweenGraphs, EagerRecorder, ForwardWrapper, OpRecorder, OpVisitor, RandomState


class ActivationTable:
    """The claims on every region; `install` wraps the regions' forwards so that they follow the claims.

    Args:
        model: The model that contains the regions.
        regions: Qualified names of the blocks, in forward order.
    """

    def __init__(self, model: nn.Module, regions: list[str]) -> None:
        # Buffers of the whole model: a block may save one that another module owns, such as rotary tables.
        self.lasting = {id_of(buffer) for buffer in model.buffers()}
        self.regions = [Region(name, model.get_submodule(name), index) for index, name in enumerate(regions)]
        self.traffic = Traffic()
        self.ssd_spill = SSDSpill(0)
        self.prefetcher = Prefetcher(0)
        self.out_at_once = 1
        """Copies to the host that may be in flight (Rule 6)."""
        self.slots: Slots | None = None
        self.own: OwnOutputs | None = None
        """Outputs of a pipeline stage's own blocks; None without a pipeline."""
        self.stages: list[int] = []
        """The stage of each region; empty without a pipeline."""
        self.last = {len(regions) - 1}
        """Regions at whose end all copies in flight are completed (Rule 6)."""
        # Weak: autograd's handles keep an entry alive, so it ends with the last node that needs it.
        self.entries: dict[int, weakref.ref[SavedStorage]] = {}
        # Copies to the host in flight, each with the number of the call that started it.
        self._on_the_way: deque[tuple[SavedStorage, int]] = deque()
        self._call = 0  # number of calls of regions that have begun
        self._between_graphs = BetweenGraphs("whose saved tensors memtune recomputes or offloads")
        self._undo: list[Callable[[], None]] = []

    def claim_recompute(self, index: int, keep: Keep | None = None) -> None:
        """Claim that region `index` is recomputed in backward, except for the outputs that `keep` names.

        Raises:
            ApplyError: Another technique recomputes the region.
        """
        region = self.regions[index]
        if region.recompute:
            raise ApplyError(
                f"two techniques recompute {region.name}.", fix="choose one recompute technique", code="MT305"
            )
        region.inner, region.keep = RECOMPUTE, keep

    def claim_move(
        self,
        index: int,
        fraction: float,
        min_bytes: int,
        only: frozenset[OpAddress] | None = None,
        policy: SavedTensorPolicy = OFFLOAD,
    ) -> None:
        """Claim that `fraction` of the claimable bytes of region `index` is packed by `policy`.

        Args:
            index: Row of the region.
            fraction: Share of the claimable bytes, from 0 to 1.
            min_bytes: Smaller tensors are kept as they are.
            only: Calls whose outputs are claimable; None: all saved tensors.
            policy: One with hops.

        Raises:
            ApplyError: Another technique offloads activations of the region.
        """
        region = self.regions[index]
        if region.move:
            raise ApplyError(
                f"two techniques offload the activations of {region.name}.", fix="choose one", code="MT305"
            )
        region.move, region.min_bytes, region.only, region.policy = fraction, min_bytes, only, policy

    def install(self) -> None:
        """Wrap the forward of every region with a claim or with copies that complete at its end (Rule 6)."""
        moves = [region for region in self.regions if region.move]
        for region in self.regions:
            if region.recompute or region.move:
                self._wrap(region, self._claimed(region))
            elif moves:
                # Only so that copies in flight complete at its end (Rule 6).
                self._wrap(region, self._unclaimed(region))

    def remove(self) -> None:
        """Restore the original forward of every region."""
        for undo in reversed(self._undo):
            undo()
        self._undo.clear()

    def _claimed(self, region: Region) -> Callable[..., Any]:
        original = region.module.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            # Dynamo cannot trace hooks on saved tensors that compare and count.
            if torch.compiler.is_compiling() and torch.is_grad_enabled():
                return self._between_graphs.run(region.name, forward, args, kwargs)
            # Under `no_grad`, or in a checkpoint of the user's own, a frame would hold the inputs without a
            # use.
            if not autograd_saves():
                return original(*args, **kwargs)
            if torch._C._functorch.peek_interpreter_stack() is not None:
                raise error_of(inside_torch_func(region.name))
            number = self._call = self._call + 1
            self.traffic.forwards.add(region.name)
            if region.recompute:
                frame = _Frame(self, region, original, args, kwargs)
                del args, kwargs  # only the frame may hold them: offloaded ones as bytes on the host
                out = frame.run()
            else:
                out = CallMoves(self, region, args, kwargs).run(original, args, kwargs)
            self._call_ends(region, number)
            return out

        return forward

    def _unclaimed(self, region: Region) -> Callable[..., Any]:
        original = region.module.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            number = self._call = self._call + 1
            out = original(*args, **kwargs)
            if autograd_saves():
                self._call_ends(region, number)
            return out

        return forward

    def _wrap(self, region: Region, forward: Callable[..., Any]) -> None:
        module, original = region.module, region.module.forward
        had = "forward" in vars(module)
        module.forward = ForwardWrapper(forward, original)

        def undo() -> None:
            if had:
                module.forward = original
            else:
                del module.forward

        self._undo.append(undo)

    # -- offload ---------------------------------------------------------------------------------------------

    def entry(
        self,
        tensor: Tensor,
        storage: torch.UntypedStorage,
        region: Region,
        share: ByteShare[SavedStorage],
        least_bytes: int,
        *,
        may_move: bool,
    ) -> SavedStorage:
        """Return the entry of `tensor`'s `storage`; without one make one that `region`'s claim keeps or packs
        (Rule 10).

        `share` counts the claimable bytes of the current call, storages below `least_bytes` are kept. Each
        storage has one entry: the first region that saves it decides.
        """
        key = storage._cdata
        weak = self.entries.get(key)
        # The address of a storage may be that of an earlier one, so a hit is checked.
        if weak is not None and (found := weak()) is not None and found.is_of(storage):
            return found
        n_bytes = storage.nbytes()
        entry = SavedStorage(self, tensor, region.policy, f"a saved activation of {region.name}")
        # The element size must divide the storage, or no flat tensor of the type covers it.
        if may_move and n_bytes >= least_bytes and n_bytes % tensor.element_size() == 0:
            self.entries[key] = weakref.ref(entry)
            entry.keep_readable(tensor)
            if share.is_offloaded_whole(entry, n_bytes):
                self.offload(entry, region, n_bytes)
        return entry

    def offload(self, entry: SavedStorage, region: Region, n_bytes: int) -> None:
        """Offload the first `n_bytes` of `entry`, as `region` claims."""
        self.traffic.moved_bytes += n_bytes
        if not entry.policy.hops[0].is_copy:
            entry.compress()
            return
        if self.slots is not None:
            self.slots.offload(entry, n_bytes)
            return
        # Before the next copy starts, so that at most `out_at_once` sources are held twice (Rule 6).
        while len(self._on_the_way) >= self.out_at_once:
            self._complete_oldest()
        entry.offload(n_bytes)
        self._on_the_way.append((entry, self._call))
        if not entry.policy.spills:
            self.prefetcher.note_offload(entry, self._call, runs_again=region.recompute)

    def complete_offloads(self) -> None:
        """Complete D2H copies in flight (Rule 6), and start the SSD writes of those that spill (Rule 7)."""
        while self._on_the_way:
            self._complete_oldest()

    def _complete_oldest(self) -> None:
        entry, _ = self._on_the_way.popleft()
        entry.complete_offload()
        if entry.policy.spills:
            self.ssd_spill.start_write(entry)

    def read_from_ssd(self, entry: SavedStorage) -> None:
        """Read `entry` from SSD into host memory (Rule 7)."""
        self.ssd_spill.ensure_read(entry)

    def reload(self, entry: SavedStorage) -> None:
        """Reload `entry`, which backward has unpacked (Rule 8)."""
        (self.slots or self.prefetcher).reload(entry)

    def _call_ends(self, region: Region, number: int) -> None:
        """Complete copies at the end of call `number` of `region` (Rule 6)."""
        # Copies of this call may continue into the next region; after the last one no later call would end
        # them.
        ends = region.index in self.last
        while self._on_the_way and (self._on_the_way[0][1] != number or ends):
            self._complete_oldest()
        if ends and self.stages:
            self.ssd_spill.forward_ends()


class _Number:
    """Number of a recomputed tensor of a region's forward; autograd saves it instead of the tensor."""

    __slots__ = ("_frame", "_n")

    def __init__(self, frame: _Frame, n: int) -> None:
        self._frame, self._n = frame, n

    def get(self) -> Tensor:
        return self._frame.recomputed(self._n)

    # Autograd drops its saved objects when it frees a node, so this shows which tensors can still be asked
    # for.
    def __del__(self) -> None:
        self._frame.forget(self._n)


class _Frame:
    """One run of one region's forward, with the state needed to run it again."""

    def __init__(self, table: ActivationTable, region: Region, forward: Any, args: Any, kwargs: Any) -> None:
        self.table, self.region, self._forward = table, region, forward
        self._call: Any = (args, kwargs)
        self._arguments: CallArguments | None = CallArguments(args, kwargs)
        # FSDP2 registers unsharded parameters for compute, so storages change between calls.
        region.contract.refresh()
        self.fixed = region.contract.names()
        self.inputs = {id_of(t): t for t in self._arguments.leaves if is_plain(t)}
        self.kept = KeptByStorage()
        self.skipped = SkippedCalls()
        self._moves = CallMoves(table, region, args, kwargs) if region.move else None
        self.count = 0
        self.fingerprints: list[Fingerprint | QuickFingerprint] = []
        """Fingerprints of the recomputed tensors."""
        self.magnitudes: dict[int, Tensor | float | None] = {}
        """Magnitudes by number: all in the region's first run, later only the one that is compared."""
        self.wanted: set[int] = set()
        """Numbers of the recomputed tensors that autograd still holds."""
        self._back: dict[int, Tensor] = {}
        first = RegionRun(region.contract, self.inputs.values(), is_first=not region.watched)
        self._first: RegionRun | None = first
        # Autocast's cached casts may be in the graph of one run only, which the quick form would report.
        self.is_quick = region.is_quick and not first.autocast
        self._fingerprinter = self.fingerprinter()
        self.quick = self._fingerprinter.quick

    def fingerprinter(self) -> Fingerprinter | QuickFingerprinter:
        """Return what compares both runs: the quick form once the region has shown that it suffices."""
        if self.is_quick:
            return QuickFingerprinter(self.fixed)
        return Fingerprinter(self.fixed)

    def run(self) -> Any:
        """Run the forward for the first time; each tensor that autograd saves passes through `pack`."""
        region, first = self.region, self._first
        assert first is not None
        # An earlier second run whose values have reached the host by now, so that this check does not wait.
        if region.compared is not None and region.compared.is_here():
            compared, region.compared = region.compared, None
            compared.check()
        (args, kwargs), self._call = self._call, None
        self._checks_values = region.policy.is_exact and (
            not region.watched or region.checks_values(self.inputs.values())
        )
        packer = _Packer(self)
        with saved_tensors_hooks(packer, unpack), ExitStack() as stack:
            self._enter_contexts(stack)
            out = self._forward(*args, **kwargs)
        region.watched = True
        # Autograd keeps the hook for as long as the saved tensors, and would keep the frame with it.
        packer.frame = None
        first.ended(region.name)
        self.inputs = {}
        del args, kwargs, stack
        self._settle()
        if self._moves is not None:
            self._moves.end()
        return out

    def _enter_contexts(self, stack: ExitStack) -> None:
        """Enter the contexts of the first run; there are none in most regions after their first run."""
        region = self.region
        visitors = self._guards(stack, is_first=not region.watched)
        named = None if self._moves is None else self._moves.named
        is_eager = named is not None or region.keep is not None
        if region.keep is not None:
            random = partial(RandomState.kept, region.module, region.contract.generators)
            visitors.append(KeepOutputs(region.keep, self.kept, self.skipped, lambda: self.count, random))
        if named is not None:
            visitors.append(named)
        if visitors:
            stack.enter_context(EagerRecorder(*visitors) if is_eager else OpRecorder(*visitors))

    def _guards(self, stack: ExitStack, *, is_first: bool) -> list[OpVisitor]:
        """Enter the guard of collectives; return the visitors of a run that guard it."""
        visitors: list[OpVisitor] = []
        if self._first is not None and self._first.noted is not None:
            visitors.append(self._first.noted)
        if is_on_ranks():
            stack.enter_context(refused_in(self.region.name))
            if needs_visitor(is_first):
                visitors.append(RefuseExchanges())
        return visitors

    def _settle(self) -> None:
        """After the first run drop kept outputs that no second run reads, offload claimed ones (Rule 5)."""
        needed = self.region.last_unpacked = max(self.wanted, default=-1)
        self.skipped.settle(needed, all_kept=self.kept.settle(needed))
        if not self.wanted:  # nothing to recompute, so the inputs are not needed either
            self._arguments, self._first = None, None
            return
        if self._moves is not None and self._arguments is not None:
            claimed = once_each(lambda t: self.claim(t) if is_plain(t) and id_of(t) not in self.fixed else t)
            self._arguments.convert(claimed)
        for each in self.kept.calls.values():
            each.settle(None if self._moves is None else self._moves.claim)
        self.table.traffic.recomputed_regions.add(self.region.name)

    def claim(self, tensor: Tensor) -> Tensor | OffloadedTensor:
        """Return `tensor`, or a handle to its offloaded storage (Rule 2)."""
        return tensor if self._moves is None else self._moves.claim(tensor)

    def pack(self, tensor: Tensor) -> Tensor | OffloadedTensor | _Number:
        """Return the object that autograd saves instead of `tensor` (Rules 1 to 3)."""
        key = id_of(tensor)
        # A copy of a parameter would be stale or double: FSDP2 frees it after forward and refills it in
        # place.
        if key in self.fixed:
            self._fingerprinter.passes(key)
            return tensor
        if not is_plain(tensor):
            return tensor
        # The inputs exist in any case, since the second run starts from them.
        if key in self.inputs:
            return detached(self.claim(tensor))
        kept = self.kept.find(key, tensor)
        if kept is not None:
            return detached(kept.claimed(tensor, self.claim(tensor)))
        if self.skipped.is_output(tensor):
            return detached(self.claim(tensor))
        n = self.count
        self.count = n + 1
        self.wanted.add(n)
        self.fingerprints.append(self._fingerprinter.fingerprint(tensor))
        # All values once, then those of the last tensor alone, which depends on all before it.
        if self._checks_values and (not self.region.watched or n == self.region.last_unpacked):
            self.magnitudes[n] = magnitude(tensor)
        return _Number(self, n)

    def is_kept(self, tensor: Tensor) -> bool:
        """Return whether `tensor` is a view of an output that the first run kept, or of a skipped call."""
        return self.skipped.is_output(tensor) or self.kept.find(id_of(tensor), tensor) is not None

    # -- the second run --------------------------------------------------------------------------------------

    def recomputed(self, n: int) -> Tensor:
        """Return the n-th recomputed tensor; run the forward again if it is not available."""
        if n not in self._back:
            self._run_again()
        return self._back.pop(n)

    def forget(self, n: int) -> None:
        """Drop the n-th recomputed tensor: autograd has released it, unpacked or not."""
        self.wanted.discard(n)
        self._back.pop(n, None)

    def _run_again(self) -> None:
        # Leaves of a new graph: backward must not reach the first run's graph through the second's.
        assert self._arguments is not None
        args, kwargs, leaves = self._arguments.made(once_each(as_input))
        replay = Replay(self, {id_of(t) for t in leaves if isinstance(t, Tensor)})
        # Fingerprints read `grad_fn`, so the second run records a graph; its hooks refuse any backward
        # through it.
        with torch.enable_grad(), saved_tensors_hooks(replay.pack, refuse_unpack), ExitStack() as stack:
            self._enter_contexts_again(stack)
            try:
                self._forward(*args, **kwargs)
            except StopReplay:
                pass
        if replay.count < replay.enough:
            raise ApplyError(
                f"{self.region.name} saved {self.count} tensors in forward but {replay.count} when it was run"
                f" again, without {first_op(self.fingerprints[replay.count :])}.",
                fix=(
                    "its forward must do the same each time it runs; choose recompute: {kind: none} if it"
                    " cannot"
                ),
                code="MT307",
            )
        replay.settle()

    def _enter_contexts_again(self, stack: ExitStack) -> None:
        """Enter the contexts of the second run."""
        assert self._first is not None
        for context in self._first.contexts():
            stack.enter_context(context)
        visitors = self._guards(stack, is_first=False)
        if self.region.keep is not None:
            stack.enter_context(EagerRecorder(*visitors, ReplayOutputs(self.kept, self.skipped)))
        elif visitors:
            stack.enter_context(OpRecorder(*visitors))

    def keep_back(self, n: int, tensor: Tensor) -> None:
        """Store the n-th tensor of the second run until backward unpacks it, if autograd still holds it."""
        if n in self.wanted:
            self._back[n] = tensor


class _Packer:
    """Pack hook that calls `frame.pack` during the first run.

    Autograd keeps the hook with every tensor that it saved, parameters included, so the hook must not hold
    the frame after the run.
    """

    def __init__(self, frame: _Frame) -> None:
        self.frame: _Frame | None = frame

    def __call__(self, tensor: Tensor) -> Tensor | OffloadedTensor | _Number:
        assert self.frame is not None
        return self.frame.pack(tensor)

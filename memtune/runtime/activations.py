"""One table for every activation: keep it, recompute it, or move it to the host. Recompute and offload both claim here.

A *region* is a block of the model. While its forward runs, everything autograd saves passes through `_Frame.pack`:

Rule 1. Parameters and buffers are saved as they are: sharding frees and refills them in place.
Rule 2. What came in from outside (the region's input) and what a recompute technique keeps is *claimable*: it is saved
        as it is, or moved to the host if the table says so. In a region that is not recomputed everything is claimable.
Rule 3. All else is saved as a number. The first number that backward asks for runs the region's forward again, with the
        random state, autocast and inputs it had, up to the last tensor that autograd still holds; each is handed out once.
Rule 4. A buffer that the forward changes is put back after the second run. The second run starts with what was in it before the
        first one (spectral norm's vectors, a codebook's averages), but for statistics that PyTorch's norms only write.
Rule 5. A kept tensor that is changed in place after it was kept is no longer kept: its op runs again instead.
Rule 6. A copy to the host holds its source until the next copy is started, the forward of another call of a region ends, that
        of the last region ends, or backward fetches, whichever comes first: one tensor at most is on its way, and when it is
        freed does not depend on timing. With `out_at_once` so many may be on their way, and the last copy of those that are
        started next counts. Calls under `no_grad`, or in a checkpoint of the model's own, do not count.
Rule 7. What goes on to SSD is written from host memory from then on; `runtime.shelf` has the rules of that.
Rule 8. What backward asks for comes back then, or ahead of that; `runtime.come_ahead` has the rule.
Rule 9. On a stage of a pipeline only what its own blocks have made moves, and copies may follow the schedule (`runtime.slots`).
Rule 10. What moves is the claimed share to the byte (`memtune.byte_share`): at the end of a region's call the last tensor that
        stayed is cut, what is missing of it leaves and the rest stays in memory of its own. A storage is decided about once, by
        the first region that saves it.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves, tree_map

from memtune.autocast import autocast_now
from memtune.byte_share import ByteShare
from memtune.calls import INPUTS, Call
from memtune.errors import ApplyError
from memtune.runtime.changed_buffers import changed_buffers, copied_buffers, only_written
from memtune.runtime.come_ahead import Ahead
from memtune.runtime.exchanges import refused_in
from memtune.runtime.inputs_again import as_input, once_each
from memtune.runtime.kept import Keep, KeepMode, Kept, NamedMode, ReplayMode
from memtune.runtime.left_out import LeftOut
from memtune.runtime.look import Look, Trail, first_op, magnitude
from memtune.runtime.moved import Entry, Moved, View, id_of, is_written_part
from memtune.runtime.own_checkpoint import autograd_sees
from memtune.runtime.own_outputs import OwnOutputs
from memtune.runtime.random_state import NoteGenerators, RandomState, generators_of
from memtune.runtime.region import Region as Region
from memtune.runtime.region import Traffic
from memtune.runtime.replaced_forward import StandsAround
from memtune.runtime.second_run import Enough, Replay, is_plain, never
from memtune.runtime.shelf import Shelf
from memtune.runtime.slots import Slots
from memtune.runtime.tree import local


class ActivationTable:
    """The claims on every region; `install` makes the regions' forwards follow them.

    Args:
        model: The model whose blocks they are.
        regions: Qualified names of the blocks, in forward order.
    """

    def __init__(self, model: nn.Module, regions: list[str]) -> None:
        self._lasting = {id_of(buffer) for buffer in model.buffers()}
        self.regions = [Region(name, model.get_submodule(name), index) for index, name in enumerate(regions)]
        self.traffic = Traffic()
        self.shelf = Shelf(0)
        self.ahead = Ahead(0)
        self.out_at_once = 1
        """Copies to the host that may be on their way (Rule 6)."""
        self.slots: Slots | None = None
        self.own: OwnOutputs | None = None
        """On a stage of a pipeline: what its blocks have made."""
        self.stages: list[int] = []
        """The stage of each region; none where there is no pipeline."""
        self.last = {len(regions) - 1}
        """Regions at whose own end a copy lands (Rule 6)."""
        self._entries: weakref.WeakValueDictionary[int, Entry] = weakref.WeakValueDictionary()
        self._on_the_way: deque[tuple[Entry, int]] = deque()  # with the number of the call that each was started in
        self._call = 0  # calls of regions that began so far
        self._undo: list[Callable[[], None]] = []

    def claim_recompute(self, index: int, keep: Keep | None = None) -> None:
        """Region `index` is recomputed in backward, but for what `keep` names; ApplyError where one already is."""
        region = self.regions[index]
        if region.recompute:
            raise ApplyError(f"two techniques recompute {region.name}.", fix="choose one recompute technique", code="MT305")
        region.recompute, region.keep = True, keep

    def claim_move(
        self, index: int, fraction: float, min_bytes: int, only: frozenset[Call] | None = None, ssd: bool = False
    ) -> None:
        """`fraction` of the claimable bytes of region `index` goes to the host (with `ssd`: on to SSD), none under `min_bytes`.

        With `only`, nothing but what these calls return counts as claimable. ApplyError where another technique moves it.
        """
        region = self.regions[index]
        if region.move:
            raise ApplyError(f"two techniques move the activations of {region.name}.", fix="choose one", code="MT305")
        region.move, region.min_bytes, region.only, region.ssd = fraction, min_bytes, only, ssd

    def install(self) -> None:
        """Wrap the forward of every region that has a claim, and of those at whose end a copy lands (Rule 6)."""
        moves = [region for region in self.regions if region.move]
        for region in self.regions:
            if region.recompute or region.move:
                self._wrap(region, self._claimed(region))
            elif moves:
                self._wrap(region, self._landing(region))

    def remove(self) -> None:
        """Give every region its own forward back."""
        for undo in reversed(self._undo):
            undo()
        self._undo.clear()

    def _claimed(self, region: Region) -> Callable[..., Any]:
        original = region.module.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            if not autograd_sees():
                return original(*args, **kwargs)
            number = self._call = self._call + 1
            frame = _Frame(self, region, original, args, kwargs)
            del args, kwargs  # the frame holds them (moved ones only as bytes on the host)
            out = frame.run()
            self._call_ends(region, number)
            return out

        return forward

    def _landing(self, region: Region) -> Callable[..., Any]:
        original = region.module.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            number = self._call = self._call + 1
            out = original(*args, **kwargs)
            if autograd_sees():
                self._call_ends(region, number)
            return out

        return forward

    def _wrap(self, region: Region, forward: Callable[..., Any]) -> None:
        module, original = region.module, region.module.forward
        had = "forward" in vars(module)
        module.forward = StandsAround(forward, original)

        def undo() -> None:
            if had:
                module.forward = original
            else:
                del module.forward

        self._undo.append(undo)

    # -- moves ---------------------------------------------------------------------------------------------------------

    def entry(self, tensor: Tensor, region: Region, share: ByteShare[Entry], *, may_move: bool = True) -> Entry:
        """The entry of `tensor`'s storage: the one it has, or a new one that is kept or moved by `region`'s claim (Rule 10).

        `share` counts the claimable bytes of the call at hand.
        """
        key = id_of(tensor)
        found = self._entries.get(key)
        if found is not None and found.is_of(tensor):
            return found
        n_bytes = tensor.untyped_storage().nbytes()
        entry = Entry(self, tensor, f"a saved activation of {region.name}" if region.ssd else "")
        if may_move and n_bytes >= max(region.min_bytes, 1) and n_bytes % tensor.element_size() == 0:
            self._entries[key] = entry
            entry.hold(tensor)
            if share.takes(entry, n_bytes):
                self.leave(entry, region, n_bytes)
        return entry

    def leave(self, entry: Entry, region: Region, n_bytes: int) -> None:
        """`n_bytes` of `entry` leave, by the claim of `region`."""
        self.traffic.moved_bytes += n_bytes
        if self.slots is not None:
            self.slots.leave(entry, n_bytes)
            return
        while len(self._on_the_way) >= self.out_at_once:
            self._land_first()
        entry.leave(n_bytes)
        self._on_the_way.append((entry, self._call))
        if not entry.goes_on:
            self.ahead.left(entry, self._call, runs_again=region.recompute)

    def lasts(self, tensor: Tensor) -> bool:
        """`tensor` stays on the device whatever happens here: a parameter, a buffer of any module, a part being written."""
        return isinstance(tensor, nn.Parameter) or id_of(tensor) in self._lasting or is_written_part(tensor)

    def land(self) -> None:
        """Complete the copies that are on their way (Rule 6); what goes on to SSD does so now (Rule 7)."""
        while self._on_the_way:
            self._land_first()

    def _land_first(self) -> None:
        entry, _ = self._on_the_way.popleft()
        entry.arrive()
        if entry.goes_on:
            self.shelf.put(entry)

    def take(self, entry: Entry) -> None:
        """Rule 7: read `entry` from SSD."""
        self.shelf.take(entry)

    def bring(self, entry: Entry) -> None:
        """Rule 8: backward asks for `entry`."""
        (self.slots or self.ahead).bring(entry)

    def _call_ends(self, region: Region, number: int) -> None:
        """Rule 6 at the end of the call `number`, of `region`."""
        ends = region.index in self.last
        while self._on_the_way and (self._on_the_way[0][1] != number or ends):
            self._land_first()
        if ends and self.stages:
            self.shelf.forward_ends()


class _Number:
    """The n-th tensor that the region's forward saved and that is recomputed."""

    def __init__(self, frame: _Frame, n: int) -> None:
        self._frame, self._n = frame, n

    def get(self) -> Tensor:
        return self._frame.recomputed(self._n)

    def __del__(self) -> None:
        self._frame.forget(self._n)


class _Frame:
    """One run of one region's forward, and all that is needed to run it again."""

    def __init__(self, table: ActivationTable, region: Region, forward: Any, args: Any, kwargs: Any) -> None:
        self.table, self.region, self._forward = table, region, forward
        self._args: Any = (args, kwargs)
        self._foreign = table.own.others(self._args) if table.own is not None else frozenset[int]()
        fixed = (*region.module.named_parameters(), *region.module.named_buffers())
        self.fixed = {id_of(local(tensor)): name for name, tensor in fixed}
        self.inputs = {id_of(t): t for t in tree_leaves(self._args) if is_plain(t)}
        self.kept: dict[Call, Kept] = {}
        self.left_out = LeftOut()
        self._named = None if region.only is None else NamedMode(region.only)
        self._entered = frozenset(self.inputs) if region.only is not None and INPUTS in region.only else frozenset()
        self._share = ByteShare[Entry](region.move)
        self._decided: dict[int, Entry] = {}
        self.count = 0
        self._trail, self.looks = Trail(self.fixed), list[Look]()
        """Of each tensor that is recomputed."""
        self.magnitudes: dict[int, Tensor | float | None] = {}
        """Of the same in the region's first run, else of the one that it looks at; by number."""
        self.wanted: set[int] = set()
        """Numbers that autograd still holds."""
        if region.recompute and not region.watched:
            region.generators = generators_of(region.module)
        self._random = region.random_state() if region.recompute else None
        self._autocast = autocast_now() if region.recompute else []
        self._noted: NoteGenerators | None = None
        self._back: dict[int, Tensor] = {}
        self._changed_buffers: list[str] = []
        self._before: dict[str, Tensor] = {}
        """What was in the buffers of `region.reads_back`."""

    def run(self) -> Any:
        """The first run, with everything that autograd saves passing through `pack`."""
        self.table.traffic.forwards.add(self.region.name)
        if self.region.compared is not None and self.region.compared.is_here():
            compared, self.region.compared = self.region.compared, None
            compared.check()
        args, kwargs = self._args
        recompute = self.region.recompute
        inputs = [(t, t._version) for t in self.inputs.values()] if recompute else []
        buffers = {name: buffer._version for name, buffer in self.region.module.named_buffers()} if recompute else {}
        self._before = copied_buffers(self.region.module, self.region.reads_back) if recompute else {}
        keep = self.region.keep if recompute else None
        random = partial(RandomState.kept, self.region.module, self.region.generators)
        mode = nullcontext() if keep is None else KeepMode(keep, self.kept, self.left_out, lambda: self.count, random)
        packer = _Packer(self)
        watch = refused_in(self.region.name, first=not self.region.watched) if recompute else nullcontext()
        self._noted = noted = NoteGenerators(self.region.generators) if recompute and not self.region.watched else None
        with saved_tensors_hooks(packer, _unpack), self._named or nullcontext(), mode, watch, noted or nullcontext():
            out = self._forward(*args, **kwargs)
        if noted is not None and noted.found and self._random is not None:
            self._random = self._random.beside(noted.found)
        self._random, self.region.watched = self.region.needed(self._random, noted), True
        packer.frame = None
        if recompute:
            if any(tensor._version != version for tensor, version in inputs):
                raise ApplyError(
                    f"{self.region.name} changes its input in place, so it cannot be run a second time.",
                    fix="write x = x + y instead of x += y at the start of its forward, or choose recompute: {kind: none}",
                    code="MT306",
                )
            self._changed_buffers = changed_buffers(self.region.module, buffers)
            self._before = {name: copy for name, copy in self._before.items() if name in self._changed_buffers}
            changed = frozenset(self._changed_buffers) - only_written(self.region.module)
            self.region.reads_back = changed | (self.region.reads_back or frozenset())
        self.inputs = {}
        del args, kwargs, inputs, mode, watch, noted  # the mode names all that was kept, needed or not
        if recompute:
            self._settle()
        else:
            self._args = None
        rest = self._share.rest()
        if rest is not None:
            self.table.leave(rest[0], self.region, rest[1])
        self._decided, self._named, self._share = {}, None, ByteShare(0.0)
        return out

    def _settle(self) -> None:
        """After the first run: drop what the second will not ask for (Rule 5), let the table move what is left."""
        needed = self.region.looked_at = max(self.wanted, default=-1)
        asked = sum(kept.before <= needed for kept in self.kept.values())
        self.kept = {key: kept for key, kept in self.kept.items() if kept.before <= needed and kept.unchanged()}
        self.left_out.settle(needed, all_kept=len(self.kept) == asked)
        if not self.wanted:  # nothing to recompute: the inputs are not needed either
            self._args, self._before = None, {}
            return
        claimed = once_each(lambda t: self.claim(t) if is_plain(t) and id_of(t) not in self.fixed else t)
        self._args = tree_map(claimed, self._args)
        for kept in self.kept.values():
            kept.settle(self.claim)
        self.table.traffic.recomputed_regions.add(self.region.name)

    def claim(self, tensor: Tensor) -> Tensor | Moved:
        """Rule 2: `tensor` as it is, or its place on the host."""
        if not self.region.move or self.table.lasts(tensor) or id_of(tensor) in self._foreign:
            return tensor
        entry = self._decided.get(id_of(tensor))
        if entry is None or not entry.is_of(tensor):
            may_move = self._named is None or self._named.made(tensor) or id_of(tensor) in self._entered
            entry = self._decided[id_of(tensor)] = self.table.entry(tensor, self.region, self._share, may_move=may_move)
        return Moved(entry, View.describe(tensor)) if entry.may_leave else tensor

    def pack(self, tensor: Tensor) -> Tensor | Moved | _Number:
        """What autograd is given in place of `tensor`, by Rules 1 to 3."""
        key = id_of(tensor)
        if key in self.fixed:
            self._trail.passes(key)
            return tensor
        if not is_plain(tensor):
            return tensor
        if not self.region.recompute or key in self.inputs:
            return _apart(self.claim(tensor))
        kept = next((kept for kept in self.kept.values() if kept.holds(tensor)), None)
        if kept is not None:
            return _apart(kept.claimed(tensor, self.claim(tensor)))
        if self.left_out.made(tensor):
            return _apart(self.claim(tensor))
        self.wanted.add(self.count)
        self.looks.append(self._trail.look(tensor))
        if not self.region.watched or self.count == self.region.looked_at:
            self.magnitudes[self.count] = magnitude(tensor)
        self.count += 1
        return _Number(self, self.count - 1)

    def is_kept(self, tensor: Tensor) -> bool:
        """`tensor` looks into an output that the first run kept, or of a call that it left out."""
        return self.left_out.made(tensor) or any(kept.holds(tensor) for kept in self.kept.values())

    # -- the second run ------------------------------------------------------------------------------------------------

    def recomputed(self, n: int) -> Tensor:
        """The n-th saved tensor; runs the forward again if it is not at hand."""
        if n not in self._back:
            self._run_again()
        return self._back.pop(n)

    def forget(self, n: int) -> None:
        """Autograd has let go of the n-th saved tensor, asked for or not."""
        self.wanted.discard(n)
        self._back.pop(n, None)

    def _run_again(self) -> None:
        args, kwargs = tree_map(once_each(as_input), self._args)
        mode = ReplayMode(self.kept, self.left_out) if self.region.keep is not None else nullcontext()
        replay = Replay(self, {id_of(t) for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)})
        with ExitStack() as stack:
            stack.enter_context(self._put_back_buffers())
            stack.enter_context(nullcontext() if self._random is None else self._random.restored())
            for autocast in self._autocast:
                stack.enter_context(autocast())
            stack.enter_context(torch.enable_grad())
            stack.enter_context(saved_tensors_hooks(replay.pack, never))
            stack.enter_context(refused_in(self.region.name, first=False))
            stack.enter_context(mode)
            stack.enter_context(self._noted or nullcontext())  # torch's composites may do otherwise under a mode: reshape
            try:
                self._forward(*args, **kwargs)
            except Enough:
                pass
        if replay.count < replay.enough:
            raise ApplyError(
                f"{self.region.name} saved {self.count} tensors in forward but {replay.count} when it was run again, "
                f"without {first_op(self.looks[replay.count :])}.",
                fix="its forward must do the same each time it runs; choose recompute: {kind: none} if it cannot",
                code="MT307",
            )

    @contextmanager
    def _put_back_buffers(self) -> Iterator[None]:
        buffers = dict(self.region.module.named_buffers())
        copies = [(buffers[name], buffers[name].clone()) for name in self._changed_buffers]
        with torch.no_grad():
            for name, before in self._before.items():
                buffers[name].copy_(before)
        yield
        with torch.no_grad():
            for buffer, copy in copies:
                buffer.copy_(copy)

    def keep_back(self, n: int, tensor: Tensor) -> None:
        """Store the n-th tensor of the second run until backward asks for it, if it still can."""
        if n in self.wanted:
            self._back[n] = tensor


class _Packer:
    """`frame.pack` for as long as the first run lasts.

    Autograd keeps the pack hook with everything it saved, parameters too: it must not keep the frame alive with it.
    """

    def __init__(self, frame: _Frame) -> None:
        self.frame: _Frame | None = frame

    def __call__(self, tensor: Tensor) -> Tensor | Moved | _Number:
        assert self.frame is not None
        return self.frame.pack(tensor)


def _apart(saved: Tensor | Moved) -> Tensor | Moved:
    """`saved` without its graph, which autograd puts back: a node that holds its own output would hold itself.

    Backward ends that where it comes by; what nothing of the loss was made from would stay for ever.
    """
    return saved.detach() if isinstance(saved, Tensor) and saved.grad_fn is not None else saved


def _unpack(packed: Tensor | Moved | _Number) -> Tensor:
    return packed if isinstance(packed, Tensor) else packed.get()

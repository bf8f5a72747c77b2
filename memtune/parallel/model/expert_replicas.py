"""Replicas of hot experts on ranks that get few rows (elastic placement).

Four rules:

1. A rank hosts up to `most` experts of other ranks of each layer, its guests. Their weights are sent to it
  in every forward and their gradients back in backward, so that nothing of a guest remains: parameters,
  optimizer state and checkpoints are those without replicas.
2. The rows of an expert are divided evenly among its hosts: its owner and the ranks where it is a guest.
3. Ranks count the rows of each expert. A layer's first call, and its first after every few optimizer steps,
  sums the counts over the ranks and chooses its guests, so all ranks choose alike, and never in a backward.
4. The busiest rank's hottest expert gets a replica on the rank with the fewest rows, as long as that takes
  more rows from the busiest rank than the guest's transfers are worth.

Sources: Shen et al. 2022, SE-MoE (arXiv:2205.10034), elastic training; He et al. 2022, FasterMoE (PPoPP),
section 4.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensor
from torch.autograd.function import once_differentiable

from memtune.parallel.model.expert_dispatch import Hop


@dataclass(frozen=True)
class ReplicaRule:
    """Limits of the replicas, and the time between choices."""

    most: int
    """Guests of a rank in a layer; 0: none."""
    worth_rows: int = 0
    """Rows of a call that a replica must take from the busiest rank."""
    every: int = 16
    """Optimizer steps between choices."""


NO_REPLICAS = ReplicaRule(0)

Guests = tuple[tuple[int, ...], ...]
"""Experts that each rank hosts besides its own, ascending."""


def choose_guests(counts: Sequence[float], ranks: int, rule: ReplicaRule) -> Guests:
    """Return the guests of each rank for the rows of each expert in `counts` (rule 4)."""
    mine = len(counts) // ranks
    hosts = [[expert // mine] for expert in range(len(counts))]
    load = [float(sum(counts[rank * mine : (rank + 1) * mine])) for rank in range(ranks)]
    room = [rule.most] * ranks
    while True:
        busiest = max(range(ranks), key=load.__getitem__)
        best = (float(rule.worth_rows), -1, -1)
        for expert, at in enumerate(hosts):
            free = [rank for rank in range(ranks) if room[rank] and rank not in at]
            if busiest not in at or not free:
                continue
            target = min(free, key=load.__getitem__)
            share = counts[expert] / len(at) - counts[expert] / (len(at) + 1)
            gain = load[busiest] - max(load[busiest] - share, load[target] + counts[expert] / (len(at) + 1))
            best = max(best, (gain, expert, target), key=lambda each: each[0])
        _, expert, target = best
        if expert < 0:
            break
        at = hosts[expert]
        for rank in at:
            load[rank] -= counts[expert] / len(at) - counts[expert] / (len(at) + 1)
        load[target] += counts[expert] / (len(at) + 1)
        at.append(target)
        room[target] -= 1
    return tuple(tuple(expert for expert, at in enumerate(hosts) if rank in at[1:]) for rank in range(ranks))


@dataclass
class ReplicatedLayer:
    """The replicas of one layer of experts, and the counts of its rows.

    Args:
        experts: Number of experts.
        group: Group of the owners.
        ranks: Its size.
        rank: This rank in it.
        rule: Limits of the choice.
        is_recorded: A step is recorded, on fake ranks: all are taken to send what this one does.
    """

    experts: int
    group: str
    ranks: int
    rank: int
    rule: ReplicaRule
    is_recorded: bool = False
    is_due: bool = True
    """The next call chooses."""
    guests: Guests = ()
    calls: int = 0
    _counts: Tensor | None = None
    _slots: Tensor | None = None
    _hosts: Tensor | None = None
    _hop: Hop | None = None
    _sent: Tensor | None = None

    @property
    def own(self) -> int:
        """Number of experts of each owner."""
        return self.experts // self.ranks

    @property
    def slots(self) -> int:
        """Experts of each rank, places for guests included; every rank has as many."""
        return self.own + self.rule.most

    def slots_of(self, index: Tensor) -> Tensor:
        """Return the slot, rank · `slots` + place, of each row of `index`, the expert of each; collective."""
        # No op in place: a recording follows the values of known choices through the others.
        n_rows = torch.zeros(self.experts, dtype=torch.int64, device=index.device)
        n_rows = n_rows.scatter_add(0, index, torch.ones_like(index))
        self._counts = n_rows if self._counts is None else self._counts + n_rows
        self.calls += 1
        if self.is_due:
            self._choose(index.device)
        assert self._slots is not None
        assert self._hosts is not None
        # The number of each row among those of its expert, which go to its hosts in turn.
        order = torch.argsort(index, stable=True)
        first = (n_rows.cumsum(0) - n_rows)[index[order]]
        number = torch.arange(len(index), device=index.device) - first + self.rank
        number = number.index_select(0, torch.argsort(order))
        return self._slots[index, number % self._hosts[index]]

    def weights(self, own: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Return the guests' rows of weights of which this rank has `own`, its experts'; collective."""
        assert self._hop is not None
        found: tuple[Tensor, ...] = _Guests.apply(self._hop, self._sent, *own)  # type: ignore[no-untyped-call]
        return found

    @property
    def n_guests(self) -> int:
        """Experts that this rank hosts besides its own."""
        return 0 if self._hop is None else sum(self._hop.arriving)

    def _choose(self, device: torch.device) -> None:
        """Choose the experts that each rank hosts besides its own, by the counts so far."""
        assert self._counts is not None
        rule, counts = self.rule, self._known_counts(self._counts)
        self.guests = choose_guests([each / self.calls for each in counts], self.ranks, rule)
        hosts = [[expert // self.own * self.slots + expert % self.own] for expert in range(self.experts)]
        for rank, mine in enumerate(self.guests):
            for place, expert in enumerate(mine):
                hosts[expert].append(rank * self.slots + self.own + place)
        width = max(map(len, hosts))
        # One tensor, so rows are padded with the owner's slot.
        self._slots = torch.tensor([each + each[:1] * (width - len(each)) for each in hosts], device=device)
        self._hosts = torch.tensor([len(each) for each in hosts], device=device)
        owners = [[expert // self.own for expert in mine] for mine in self.guests]
        # A recording is of the busiest rank, which takes this one's place.
        rank = self._busiest(counts) if self.is_recorded else self.rank
        others = [(rank - self.rank + each) % self.ranks for each in range(self.ranks)]
        sent = [owners[each].count(rank) for each in others]
        arriving = [owners[rank].count(each) for each in others]
        hosted = [expert for each in others for expert in self.guests[each]]
        places = [expert % self.own for expert in hosted if expert // self.own == rank]
        n_rows = max(sum(sent), sum(arriving)) if any(counts) else self.rule.most
        # A router that is not known is taken to use all places, and the kernel of fake ranks, run on real
        # values, sends as much as it receives.
        if self.is_recorded and not (any(counts) and isinstance(self._counts, FakeTensor)):
            sent = arriving = [n_rows if each == 1 else 0 for each in range(self.ranks)]
            places = [place % self.own for place in range(n_rows)]
        self._hop = Hop(self.group, self.ranks, sent, arriving)
        self._sent = torch.tensor(places, dtype=torch.int64, device=device)
        self._counts, self.calls, self.is_due = None, 0, False

    def _busiest(self, counts: Sequence[int]) -> int:
        """Return the rank with most rows; of those as close as rounding, the one with most guests."""
        load = [0.0] * self.ranks
        for expert, count in enumerate(counts):
            at = [expert // self.own, *(rank for rank, mine in enumerate(self.guests) if expert in mine)]
            for rank in at:
                load[rank] += count / len(at)
        least = max(load) - self.ranks * self.experts
        found = (rank for rank in range(self.ranks) if load[rank] >= least)
        # Each guest is a weight more that the recorded rank holds and sends a gradient of.
        return max(found, key=lambda rank: (len(self.guests[rank]), load[rank]))

    def _known_counts(self, counts: Tensor) -> list[int]:
        """Return the rows of each expert of all ranks since the last choice, zeros if they are not known."""
        total = counts.clone()
        torch.ops.memtune.all_reduce_(total, self.group, self.ranks, "sum")
        if not isinstance(total, FakeTensor) and dist.get_backend() != "fake":
            found: list[int] = total.tolist()
            return found
        try:
            return [self.ranks * each for each in counts.tolist()]
        except DataDependentOutputException:
            return [0] * self.experts


class Boundaries:
    """Has layers choose again after every few optimizer steps."""

    def __init__(self, layers: Sequence[ReplicatedLayer]) -> None:
        self._layers, self._steps = layers, 0

    def step(self, *_: Any) -> None:
        """Count a step; a post hook of the optimizer."""
        self._steps += 1
        for layer in self._layers:
            layer.is_due = layer.is_due or self._steps % layer.rule.every == 0


class _Guests(torch.autograd.Function):
    """Weights of guests, sent by their owners; backward adds the gradients of all hosts at the owner."""

    @staticmethod
    def forward(ctx: Any, hop: Hop, sent: Tensor, *own: Tensor) -> tuple[Tensor, ...]:
        ctx.hop, ctx.own = hop, [each.shape for each in own]
        ctx.save_for_backward(sent)
        return tuple(hop.send(each.index_select(0, sent)) for each in own)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (sent,) = ctx.saved_tensors
        found: list[Tensor | None] = []
        for shape, gradient, is_needed in zip(ctx.own, gradients, ctx.needs_input_grad[2:], strict=True):
            if not is_needed:
                found.append(None)
                continue
            back = ctx.hop.send_back(gradient.contiguous())
            found.append(gradient.new_zeros(shape).index_add_(0, sent, back))
        return None, None, *found

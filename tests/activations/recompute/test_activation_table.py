"""The activation table: claims, exact gradients, freed memory, and refusals."""

from __future__ import annotations

import copy
import gc
import io
import random
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.func import jacrev, vmap

from memtune.activations.recompute import activation_table
from memtune.activations.recompute.activation_table import ActivationTable
from memtune.activations.recompute.call_moves import CallMoves
from memtune.errors import ApplyError
from memtune.runtime import transfer


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down, self.drop = (
            nn.LayerNorm(16),
            nn.Linear(16, 64),
            nn.Linear(64, 16),
            nn.Dropout(0.3),
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(self.down(torch.tanh(self.up(self.norm(x)))))


def make(block: Callable[[], nn.Module] = Block, n: int = 3) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(block() for _ in range(n)))


def table_on(model: nn.Module, claim: Callable[[ActivationTable, int], None]) -> ActivationTable:
    table = ActivationTable(model, [name for name, _ in model.named_children()])
    for index in range(len(table.regions)):
        claim(table, index)
    table.install()
    return table


def is_matmul(op: Any) -> bool:
    return str(op) in ("aten.addmm.default", "aten.mm.default")


CLAIMS: dict[str, Callable[[ActivationTable, int], None]] = {
    "recompute": lambda table, i: table.claim_recompute(i),
    "selective": lambda table, i: table.claim_recompute(i, is_matmul),
    "move": lambda table, i: table.claim_move(i, 1.0, 0),
    "move half of one": lambda table, i: table.claim_move(i, 0.5, 0) if i == 1 else None,
    "recompute and move": lambda table, i: (table.claim_recompute(i, is_matmul), table.claim_move(i, 1.0, 0))[
        0
    ],
}


def gradients(model: nn.Module, x: Tensor) -> list[Tensor]:
    torch.manual_seed(1)
    model.zero_grad()
    model(x).square().sum().backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("claim", CLAIMS.values(), ids=CLAIMS)
def test_claims_are_refused_in_calls_by_torch_func(claim: Any) -> None:
    model, x = make(), torch.randn(4, 16)
    table_on(model, claim)
    with pytest.raises(ApplyError, match=r"torch\.func calls [01], and allows no hooks"):
        vmap(jacrev(model), randomness="different")(x)


def test_recompute_is_exact_in_a_model_that_the_user_compiles() -> None:
    x = torch.randn(4, 16)
    wanted = gradients(make(), x)
    model = make()
    table_on(model, CLAIMS["recompute"])
    model.compile(backend="eager")
    assert all(torch.equal(one, two) for one, two in zip(gradients(model, x), wanted, strict=True))


@pytest.mark.parametrize("claim", CLAIMS.values(), ids=CLAIMS)
def test_recompute_is_bitwise_with_and_without_input_gradient(claim: Any) -> None:
    for requires_grad in (False, True):
        x = torch.randn(4, 16, requires_grad=requires_grad)
        wanted = gradients(make(), x)
        of_input = None if x.grad is None else x.grad.clone()
        x.grad = None
        model = make()
        table_on(model, claim)
        assert all(torch.equal(one, two) for one, two in zip(gradients(model, x), wanted, strict=True))
        assert of_input is None or torch.equal(x.grad, of_input)


@pytest.mark.parametrize("claim", CLAIMS.values(), ids=CLAIMS)
def test_copied_model_runs_its_own_weights(claim: Any) -> None:
    """A copy (averaged weights, a target network) is plain, and so is a pickled model."""
    model, x = make(), torch.randn(4, 16)
    table_on(model, claim)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for other in (copy.deepcopy(model), torch.load(file, weights_only=False)):
        with torch.no_grad():
            for weight in other.parameters():
                weight.mul_(2)
        plain = make()
        plain.load_state_dict(other.state_dict())
        model.zero_grad()
        assert all(map(torch.equal, gradients(other, x), gradients(plain, x)))
        assert all(weight.grad is None for weight in model.parameters())
        with torch.no_grad():
            assert torch.equal(other.eval()(x), plain.eval()(x))


class Packed(nn.Module):
    """The layer's argument is a PackedSequence, which looks into its tensors when it is made."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.layer, self.down = nn.Linear(16, 16), nn.LSTM(16, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(self.up(x)[:, None].expand(-1, 3, -1), [4, 4, 2])
        return x + self.down(nn.utils.rnn.pad_packed_sequence(self.layer(packed)[0])[0].sum(1))


@pytest.mark.parametrize("claim", CLAIMS.values(), ids=CLAIMS)
def test_packed_sequences_are_arguments(claim: Any) -> None:
    x, wanted = torch.randn(4, 16), []
    for is_claimed in (False, True):
        torch.manual_seed(0)
        model = Packed()
        if is_claimed:
            table_on(model, claim)
        wanted.append(gradients(model, x))
    assert all(map(torch.equal, *wanted))


def test_arguments_are_repeated_as_the_first_run_found_them() -> None:
    """The run may have changed the container they came in."""

    class Appends(Block):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(self.total([x, x.sin()]))

        def total(self, values: list[Tensor]) -> Tensor:
            return self.inner(values)

        def __init__(self) -> None:
            super().__init__()
            self.inner = Sums()

    class Sums(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(16, 16)

        def forward(self, values: list[Tensor]) -> Tensor:
            values.append(values[0].cos())
            return torch.tanh(self.linear(torch.stack(values).sum(0))).sin()

    x, found = torch.randn(4, 16), []
    for is_claimed in (False, True):
        model = make(Appends, 1)
        if is_claimed:
            table = ActivationTable(model, ["0.inner"])
            table.claim_recompute(0)
            table.install()
        found.append(gradients(model, x))
    assert all(map(torch.equal, *found))


class Conjugates(Block):
    def forward(self, x: Tensor) -> Tensor:
        both = torch.view_as_complex(self.up(x).view(-1, 32, 2))
        turned = both * both.conj()
        return x + self.down(
            torch.view_as_real(turned * both).flatten(1) * turned.conj().imag.repeat(1, 2).cos()
        )


@pytest.mark.parametrize("claim", CLAIMS.values(), ids=CLAIMS)
def test_conjugate_view_is_restored(claim: Any) -> None:
    """torch stores a conjugate as a flag on the plain values."""
    model, x = make(Conjugates), torch.randn(4, 16)
    table_on(model, claim)
    assert all(map(torch.equal, gradients(model, x), gradients(make(Conjugates), x)))


class Gates(nn.Module):
    """Cells whose gates are parts of one storage, written one by one, some after the first was saved."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.gru = nn.LSTMCell(16, 16), nn.GRUCell(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        hidden, cell = self.lstm(x)
        return self.gru(x, hidden) + cell


@pytest.mark.parametrize("claim", CLAIMS.values(), ids=CLAIMS)
def test_gates_written_after_a_save_keep_their_values(claim: Any) -> None:
    x = torch.randn(4, 16)
    wanted, model = gradients(make(Gates), x), make(Gates)
    table_on(model, claim)
    assert all(torch.equal(one, two) for one, two in zip(gradients(model, x), wanted, strict=True))


@pytest.mark.parametrize("claim", CLAIMS.values(), ids=CLAIMS)
def test_identical_inputs_are_identical_in_the_second_run(claim: Any) -> None:
    """Self-attention projects query, key and value at once if they are the same object, else one by one."""

    class Attends(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(16, 2, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            return self.attention(x.sin(), *[x.cos()] * 2)[0] + self.attention(*[x.sin()] * 3)[0]

    x = torch.randn(4, 5, 16)
    torch.manual_seed(0)
    model = Attends()
    wanted = gradients(model, x)
    table_on(model, claim)
    assert all(torch.equal(one, two) for one, two in zip(gradients(model, x), wanted, strict=True))


@pytest.mark.parametrize("begins", [0, 2], ids=["first", "later"])
@pytest.mark.parametrize("draw", [random.random, np.random.rand, np.random.randn])
@pytest.mark.parametrize("claim", CLAIMS.values(), ids=CLAIMS)
def test_draws_of_python_and_numpy_are_repeated(claim: Any, draw: Callable[[], float], begins: int) -> None:
    """Both in the second run and by the training that follows, as without recomputation."""
    step = [0]

    class Scaled(Block):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x * (1 + 0.01 * draw()) if step[0] >= begins else x)

    def two_steps(model: nn.Module) -> list[Tensor]:
        random.seed(0)
        np.random.seed(0)
        np.random.randn()  # one more is in stock
        found = []
        for step[0] in range(begins + 2):
            found += gradients(model, torch.ones(4, 16))
        return found

    wanted, model = two_steps(make(Scaled)), make(Scaled)
    table_on(model, claim)
    assert all(torch.equal(one, two) for one, two in zip(two_steps(model), wanted, strict=True))


def test_draws_after_a_kept_random_op_are_repeated() -> None:
    """As behind fused attention with dropout.

    What is kept does not draw in the second run, what follows must not notice.
    """

    class Drops(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(16, 16)

        def forward(self, x: Tensor) -> Tensor:
            kept, _ = torch.native_dropout(self.linear(x), 0.5, True)
            return nn.functional.dropout(torch.tanh(kept), 0.5).sin()

    wanted = gradients(make(Drops, 2), torch.ones(4, 16))
    model = make(Drops, 2)
    table_on(
        model, lambda table, i: table.claim_recompute(i, lambda op: str(op) == "aten.native_dropout.default")
    )
    assert all(
        torch.equal(one, two) for one, two in zip(gradients(model, torch.ones(4, 16)), wanted, strict=True)
    )


@pytest.mark.parametrize("claim", CLAIMS.values(), ids=CLAIMS)
def test_backward_frees_all_frames(claim: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    frames: list[weakref.ref[Any]] = []

    def noted(original: Any) -> Any:
        def note(self: Any, *args: Any, **kwargs: Any) -> None:
            original(self, *args, **kwargs)
            frames.append(weakref.ref(self))

        return note

    for kind in (activation_table._Frame, CallMoves):
        monkeypatch.setattr(kind, "__init__", noted(kind.__init__))
    other = make()
    table_on(other, claim)
    gradients(other, torch.randn(4, 16))  # torch's imports at a process's first call keep its Python frames
    frames.clear()
    model = make()
    table_on(model, claim)
    gc.disable()  # nothing may wait for the collector
    try:
        gradients(model, torch.randn(4, 16))
        assert frames
        assert not any(frame() for frame in frames)
    finally:
        gc.enable()


def test_frame_is_freed_with_its_last_recomputed_tensor(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Autograd keeps the pack hook with every saved tensor; a hook that refers to the frame would keep it
    alive.
    """

    class TwoLinears(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)

        def forward(self, x: Tensor) -> Tensor:
            return self.second(torch.tanh(self.first(x)))

    frames: list[weakref.ref[Any]] = []
    original = activation_table._Frame.__init__
    monkeypatch.setattr(
        activation_table._Frame,
        "__init__",
        lambda self, *a, **k: (original(self, *a, **k), frames.append(weakref.ref(self)))[0],
    )
    model = nn.Sequential(TwoLinears())
    table_on(model, lambda table, i: table.claim_recompute(i))
    alive: list[bool] = []
    x = torch.randn(4, 16, requires_grad=True)
    x.register_hook(lambda grad: alive.append(frames[0]() is not None))
    model(x).sum().backward()
    assert alive == [False]


def test_released_saves_are_not_recomputed() -> None:
    """A product whose graph is dropped before backward: the second run stops before it."""
    runs: list[str] = []

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused = nn.Linear(16, 16), nn.Linear(16, 16)

        def forward(self, x: Tensor) -> Tensor:
            y = torch.tanh(self.used(x))
            runs.append("used")
            torch.tanh(self.unused(y))
            runs.append("unused")
            return y

    model = nn.Sequential(Two())
    table_on(model, lambda table, i: table.claim_recompute(i))
    model(torch.randn(4, 16, requires_grad=True)).sum().backward()
    assert runs == ["used", "unused"]  # tanh itself is the last wanted tensor: the second run ends inside it


class InPlace(nn.Module):
    """Writes into a matmul's output through a view after it was kept."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.out = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        y[:, 0].mul_(2.0)
        return self.out(y.tanh_())


class UnsafelySplit(nn.Module):
    """Split as in torch's GRU cell: outputs of `unsafe_split` have version counters of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.out = nn.Linear(16, 16), nn.Linear(8, 16)

    def forward(self, x: Tensor) -> Tensor:
        left, right = torch.unsafe_split(self.layer(x), 8, 1)
        return self.out(left.add_(right).sigmoid())


@pytest.mark.parametrize("block", [InPlace, UnsafelySplit])
def test_kept_output_is_dropped_after_a_write(block: type[nn.Module]) -> None:
    x = torch.randn(4, 16)
    wanted = gradients(make(block), x)
    model = make(block)
    table_on(model, CLAIMS["selective"])
    assert all(torch.equal(one, two) for one, two in zip(gradients(model, x), wanted, strict=True))


def test_buffers_are_updated_once() -> None:
    def block() -> nn.Module:
        return nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Tanh())

    x = torch.randn(8, 16)
    plain, model = make(block), make(block)
    gradients(plain, x)
    table_on(model, CLAIMS["recompute"])
    gradients(model, x)
    assert all(torch.equal(one, two) for one, two in zip(plain.buffers(), model.buffers(), strict=True))
    assert model[0][1].num_batches_tracked == 1


class Wandering(nn.Module):
    """Changes a vector in each forward and divides by its value, as spectral norm does."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(16, 64), nn.Linear(64, 16), nn.BatchNorm1d(16)
        self.register_buffer("u", torch.randn(64))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.u.copy_(nn.functional.normalize(self.up.weight @ (self.up.weight.t() @ self.u), dim=0))
        return x + self.norm(self.down(torch.tanh(self.up(x) * self.u.clone())))


@pytest.mark.parametrize("claim", CLAIMS.values(), ids=CLAIMS)
def test_second_run_starts_with_the_buffers_of_the_first(claim: Any) -> None:
    x = torch.randn(4, 16)
    plain, model = make(Wandering), make(Wandering)
    table = table_on(model, claim)
    for _ in range(3):  # before the first run the changed buffers are unknown
        assert all(
            torch.equal(one, two) for one, two in zip(gradients(model, x), gradients(plain, x), strict=True)
        )
    assert all(torch.equal(one, two) for one, two in zip(model.buffers(), plain.buffers(), strict=True))
    assert {region.contract.reads_back for region in table.regions} <= {None, frozenset({"u"})}


class Router(nn.Module):
    """Leaves a loss and a counter in attributes, and reads the counter."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.calls = nn.Linear(16, 2), nn.Linear(16, 16), 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        gate = self.gate(x).softmax(-1)
        self.routed = gate.mean(0).pow(2).sum()
        return x + torch.tanh(self.up(x)) * gate[:, :1] * self.calls


@pytest.mark.parametrize("claim", [CLAIMS["recompute"], CLAIMS["selective"]], ids=["recompute", "selective"])
def test_attributes_are_left_as_the_first_run_leaves_them(claim: Any) -> None:
    x = torch.randn(4, 16)
    plain, model = make(Router), make(Router)
    table_on(model, claim)
    for calls in (1, 2, 3):
        losses = []
        for each in (plain, model):
            each.zero_grad()
            hidden = each(x * 1.0)
            losses.append(hidden.pow(2).sum() + sum(block.routed for block in each))
            losses[-1].backward()
            assert [block.calls for block in each] == [calls] * 3
        assert torch.equal(*losses)
        pairs = zip(plain.parameters(), model.parameters(), strict=True)
        assert all(torch.equal(one.grad, two.grad) for one, two in pairs)  # type: ignore[arg-type]


def test_attributes_keep_no_inputs_of_recomputed_blocks() -> None:
    """An attribute with a tensor of the second run's graph would hold the leaf that the graph starts from."""
    storages: list[weakref.ref[torch.UntypedStorage]] = []

    class Noted(Router):
        def forward(self, x: Tensor) -> Tensor:
            storages.append(weakref.ref(x.untyped_storage()))
            return super().forward(x)

    model = make(Noted)
    table_on(model, CLAIMS["recompute"])
    loss = model(torch.randn(4, 16) * 1.0).pow(2).sum() + sum(block.routed for block in model)
    loss.backward()
    del loss
    gc.collect()
    assert [ref() for ref in storages] == [None] * len(storages)


def test_unread_recomputed_tensors_are_freed_with_the_forward() -> None:
    """As in a recurrence with an unread last state: no backward releases its saves."""
    made: list[weakref.ref[torch.UntypedStorage]] = []

    class Idle(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin = nn.Linear(16, 16)

        def forward(self, x: Tensor) -> Tensor:
            state = torch.exp(self.lin(x))  # saves its own output
            made.append(weakref.ref(state.untyped_storage()))
            return x + self.lin(x)

    model = make(Idle)
    table_on(
        model, lambda table, i: table.claim_move(i, 1.0, 1 << 30)
    )  # too small to move, so it is saved as it is
    loss = model(torch.randn(4, 16)).sum()
    assert [ref() for ref in made] == [None] * 3
    loss.backward()


def test_offloaded_bytes_cross_the_link_once_each_way() -> None:
    model = make(lambda: nn.Tanh(), n=2)
    table_on(model, CLAIMS["move"])
    transfer.COUNTERS.take()
    gradients(nn.Sequential(nn.Linear(16, 16), model), torch.randn(4, 16))
    assert transfer.COUNTERS.take() == {"device_to_host": 2 * 4 * 16 * 4, "host_to_device": 2 * 4 * 16 * 4}


def test_claims_are_inactive_without_gradients() -> None:
    model = make()
    table = table_on(model, CLAIMS["move"])
    with torch.no_grad():
        model(torch.randn(4, 16))
    assert not table.traffic.forwards
    assert table.traffic.moved_bytes == 0


def test_remove_restores_the_forwards() -> None:
    model = make()
    table = table_on(model, lambda table, i: table.claim_move(i, 1.0, 0) if i == 0 else None)
    assert ["forward" in vars(block) for block in model] == [
        True
    ] * 3  # the next region's forward completes the first one's copy
    table.remove()
    assert not any("forward" in vars(block) for block in model)


def test_second_claim_of_a_kind_raises() -> None:
    table = ActivationTable(make(), ["0"])
    table.claim_recompute(0)
    table.claim_move(0, 1.0, 0)
    with pytest.raises(ApplyError, match="two techniques recompute 0"):
        table.claim_recompute(0)
    with pytest.raises(ApplyError, match="two techniques offload the activations of 0"):
        table.claim_move(0, 0.5, 0)


def test_in_place_write_to_a_block_input_raises() -> None:
    class Adds(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(16, 16)

        def forward(self, x: Tensor) -> Tensor:
            x += self.layer(x).tanh()
            return x

    model = make(Adds, n=1)
    table_on(model, CLAIMS["recompute"])
    with pytest.raises(ApplyError, match="0 changes its input in place"):
        model(torch.randn(4, 16))


FICKLE: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor], str]] = {
    "saves less": (lambda y: y.tanh().sin(), lambda y: y, "saved 2 tensors .* but 0 when it was run again"),
    "another op": (
        lambda y: y.tanh().sin(),
        lambda y: y.sigmoid().sin(),
        "SigmoidBackward0 where the first run had TanhBackward0",
    ),
    "another op that saves nothing": (
        lambda y: (y + 1).tanh().sin(),
        lambda y: (-y).tanh().sin(),
        "NegBackward0 where the first run had AddBackward0",
    ),
    "an op less": (
        lambda y: y.tanh().flip(0).sin(),
        lambda y: y.tanh().sin(),
        "nothing where the first run had FlipBackward0",
    ),
    "a view of another part": (
        lambda y: y.t().exp(),
        lambda y: y.view(16, 4).exp(),
        "ViewBackward0 where the first run had TBackward0",
    ),
    "another shape": (
        lambda y: y[:2].exp().exp(),
        lambda y: y[:3].exp().exp(),
        "was torch.float32 .2, 16. and is torch.float32 .3, 16.",
    ),
}


@pytest.mark.parametrize("what", FICKLE)
def test_divergent_second_run_raises_with_the_op(what: str) -> None:
    first, second, why = FICKLE[what]

    class Fickle(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.runs = nn.Linear(16, 16), list[None]()

        def forward(self, x: Tensor) -> Tensor:
            self.runs.append(None)  # not an attribute, which the second run would find as the first did
            return (first if len(self.runs) == 1 else second)(self.layer(x))

    model = make(Fickle, n=1)
    table_on(model, CLAIMS["recompute"])
    with pytest.raises(ApplyError, match=why):
        model(torch.randn(4, 16)).sum().backward()


def test_tensors_below_the_least_bytes_get_no_entry(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    kind = activation_table.SavedStorage
    monkeypatch.setattr(
        activation_table,
        "SavedStorage",
        lambda *args: made.append(args[1].untyped_storage().nbytes()) or kind(*args),
    )
    least_bytes = 64 * 64 * 4  # of the wide activations of 64 rows
    model = make()
    table_on(model, lambda table, i: table.claim_move(i, 1.0, least_bytes))
    gradients(model, torch.randn(64, 16))
    assert made
    assert min(made) >= least_bytes

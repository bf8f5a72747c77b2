"""Named notifications between the mechanisms of one tuned training.

`apply` applies techniques one after the other, and no technique knows which others are active. A mechanism
subscribes while it is applied. An event calls its subscribers in the order of their subscriptions, which is
the order of the slots in `apply`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Generic, ParamSpec

from torch import Tensor, nn

P = ParamSpec("P")


class Event(Generic[P]):
    """One kind of notification; subscribers are called with the parameters `P`."""

    def __init__(self) -> None:
        self._subscribers: list[Callable[P, Any]] = []

    def subscribe(self, callback: Callable[P, Any]) -> None:
        """Call `callback` on every later `emit`, after all earlier subscribers."""
        self._subscribers.append(callback)

    def emit(self, *args: P.args, **kwargs: P.kwargs) -> None:
        """Call all subscribers, the earliest first; an exception skips the later ones."""
        # In the order of subscription, that is, of the slots in `apply`: later slots may rely on what earlier
        # ones have done.
        for callback in self._subscribers:
            callback(*args, **kwargs)


class GradReady(Event[[Tensor]]):
    """Event whose emitter costs a hook per parameter or message: it starts at the first subscription."""

    def __init__(self) -> None:
        super().__init__()
        self._start: Callable[[], None] | None = None
        self.has_emitter = False
        """True if a mechanism emits this event; without an emitter a subscriber would wait forever."""

    def emit_from(self, start: Callable[[], None]) -> None:
        """Declare the emitter, before any subscription; `start` is called at the first one."""
        # From then on `emit` must be called for each gradient.
        assert not self.has_emitter
        self._start, self.has_emitter = start, True

    def subscribe(self, callback: Callable[[Tensor], Any]) -> None:
        """Subscribe as in `Event.subscribe`; the caller keeps the owner of `callback` alive (`weakly`)."""
        assert self.has_emitter
        super().subscribe(callback)
        # Dropped after the first use: `emit` becomes a tensor's hook, which must not keep the model alive.
        start, self._start = self._start, None
        if start is not None:
            start()


@dataclass
class Events:
    """All notifications of one `Context`."""

    grad_ready: GradReady = field(default_factory=GradReady)
    """(parameter of the model): its gradient is accumulated and reduced over the ranks, and does not change
    again in this micro-batch.

    Emitted inside backward in every micro-batch, on several ranks only: by FSDP2's hooks on its shards, by
    ZeRO's buckets (`ShardedBuckets`), or by replicas that all-reduce each gradient by itself
    (`AllReduceGrads`). On one rank autograd's own post-accumulate-grad hooks do the same. Subscriber:
    gradient offload.
    """
    before_grad_use: Event[[nn.Parameter, Tensor]] = field(default_factory=Event)
    """(parameter of the model, its gradient): an update inside backward is about to use the gradient and to
    free it.

    Emitted in the last micro-batch of a step by each mechanism that updates early: gradient offload, block
    offload, expert offload, the optimizer's step inside backward. Subscribers: the gradient version check,
    `GradScaler` support, and trials, which record gradients. `optimizer.step()` does not emit it for the
    gradients that it uses itself.
    """
    grads_cleared: Event[[Iterable[nn.Parameter]]] = field(default_factory=Event)
    """(parameters of the model and the optimizer's replacements of them): `zero_grad` has freed or zeroed
    their gradients.

    Emitted by `grad_scaler`, which wraps `zero_grad` of the optimizer, of the model and of its modules.
    Subscribers: mechanisms that keep gradients off the device or compare their versions.
    """
    before_grads_rescaled: Event[[]] = field(default_factory=Event)
    """(): torch's functions that clip gradients are about to change them.

    Emitted by `grad_clipping`. Subscribers: the gradient version check, which would not find earlier changes
    after the clip; block offload and sharded states, which take gradients that user code has assigned.
    """
    grads_rescaled: Event[[]] = field(default_factory=Event)
    """(): torch's functions that clip gradients have changed those that the step will use, on every tier.

    Emitted by `grad_clipping`. Subscriber: the gradient version check.
    """
    weights_loaded: Event[[]] = field(default_factory=Event)
    """(): all weights and the optimizer state have been loaded.

    Emitted by `checkpoint` at the end of `loading`. Subscribers: mechanisms that keep masters, moments or
    weights on host or SSD read them again; mechanisms that refuse to continue a partial step allow it again.
    """
    weights_gathered: Event[[]] = field(default_factory=Event)
    """(): the full weights hold the updates of all ranks.

    Emitted by ZeRO's shards (`states`) after each all-gather that follows `optimizer.step()`. Subscriber: the
    check for external writes.
    """
    parameters_sharded: Event[[Collection[str]]] = field(default_factory=Event)
    """(names of the parameters whose shards start off the device): FSDP2 shards the parameters from here on.

    Emitted once, by `sharding.shard`, before anything reads a shard's values and before the optimizer is
    rebound, so that a subscriber may replace the shards. Subscriber: `apply`, which fills the shards of a
    deferred model.
    """
    states_sharded: Event[[]] = field(default_factory=Event)
    """(): `sharding.states` has been applied; the sharding of parameters and the ranks that average gradients
    are known.

    Emitted once, by `apply`. Subscribers: model parallelism, which averages the remaining gradients, and
    recompute schedules, which refuse sharded parameters.
    """
    finished: Event[[]] = field(default_factory=Event)
    """(): training is over.

    Emitted by `Tuned.finish`. Subscribers: asynchronous updates, which end, and records on SSD for resuming,
    which are removed.
    """
    is_loading: bool = False
    """True while the optimizer loads its state and `weights_loaded` follows. Written by `loading`; read by
    hooks of the optimizer's `load_state_dict`, which otherwise would adopt the state without the weights.
    """

    @contextmanager
    def loading(self) -> Iterator[None]:
        """Mark the load of weights and optimizer state inside; emit `weights_loaded` unless it raises."""
        self.is_loading = True
        try:
            yield
        finally:
            self.is_loading = False
        # After the flag is cleared, and only for a complete load: subscribers read weights and state.
        self.weights_loaded.emit()

"""`runtime.events`: who is called, in which order, and when an emitter starts."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import nn

from memtune.runtime.events import Event, Events
from memtune.runtime.training_hooks import weakly


class _Counter:
    def __init__(self) -> None:
        self.seen: list[torch.Tensor] = []

    def add(self, parameter: torch.Tensor) -> None:
        self.seen.append(parameter)


def _trained_once() -> weakref.ref[nn.Module]:
    """A model whose hooks emit the event, after one backward; nothing but the reference that is returned
    outlives this.
    """
    model, counter, events = nn.Linear(2, 2), _Counter(), Events()

    def start() -> None:
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(events.grad_ready.emit)

    events.grad_ready.emit_from(start)
    events.grad_ready.subscribe(weakly(counter.add))
    model(torch.ones(1, 2)).sum().backward()
    assert {id(each) for each in counter.seen} == {id(each) for each in model.parameters()}
    return weakref.ref(model)


class TestEvent:
    def test_emit_calls_subscribers_in_the_order_of_their_subscriptions(self) -> None:
        event, called = Event[[int]](), list[tuple[str, int]]()
        event.subscribe(lambda value: called.append(("first", value)))
        event.subscribe(lambda value: called.append(("second", value)))
        event.emit(1)
        event.emit(2)
        assert called == [("first", 1), ("second", 1), ("first", 2), ("second", 2)]

    def test_emit_raises_what_a_subscriber_raises_and_calls_no_later_one(self) -> None:
        event, called = Event[[]](), list[int]()

        def fail() -> None:
            raise RuntimeError("refused")

        event.subscribe(fail)
        event.subscribe(lambda: called.append(1))
        with pytest.raises(RuntimeError, match="refused"):
            event.emit()
        assert not called


class TestGradReady:
    def test_emitter_starts_once_at_the_first_subscription(self) -> None:
        started, ready = list[int](), Events().grad_ready
        assert not ready.has_emitter
        ready.emit_from(lambda: started.append(1))
        assert ready.has_emitter
        assert not started
        for _ in range(2):
            ready.subscribe(lambda _: None)
        assert started == [1]

    def test_emit_as_a_tensor_hook_does_not_keep_the_model_alive(self) -> None:
        model = _trained_once()
        gc.collect()
        assert model() is None


class TestLoading:
    def test_weights_loaded_is_emitted_when_the_load_is_over(self) -> None:
        events, loading = Events(), list[bool]()
        events.weights_loaded.subscribe(lambda: loading.append(events.is_loading))
        with events.loading():
            assert events.is_loading
            assert not loading
        assert loading == [False]

    def test_weights_loaded_is_not_emitted_when_the_load_raises(self) -> None:
        events, loading = Events(), list[bool]()
        events.weights_loaded.subscribe(lambda: loading.append(True))
        with pytest.raises(RuntimeError), events.loading():
            raise RuntimeError
        assert not loading
        assert not events.is_loading

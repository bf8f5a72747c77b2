"""The common part of executors of real trials: a thread per slot, a queue of trials, a queue of events."""

from __future__ import annotations

import atexit
import queue
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from memtune.executors.base import Progress, Trial, TrialResult

CANCEL_S = 20.0


@dataclass
class _Ticket:
    trial: Trial
    started: bool = False
    cancelled: threading.Event = field(default_factory=threading.Event)
    done: threading.Event = field(default_factory=threading.Event)


class PoolExecutor(ABC):
    """Runs up to `slots` trials at the same time, each in a thread that waits for its processes.

    Threads are daemons and the pool is closed at exit, so a driver that forgets to close leaves nothing
    behind.
    """

    name: str
    measures = True

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self._todo: queue.SimpleQueue[_Ticket | None] = queue.SimpleQueue()
        self._events: queue.SimpleQueue[tuple[_Ticket, Progress | TrialResult | BaseException]] = (
            queue.SimpleQueue()
        )
        self._tickets: dict[int, _Ticket] = {}
        self._closed = False
        self._threads = [
            threading.Thread(target=self._serve, args=(slot,), daemon=True) for slot in range(slots)
        ]
        for thread in self._threads:
            thread.start()
        atexit.register(self.close)

    @abstractmethod
    def _run(
        self, trial: Trial, slot: int, on_progress: Callable[[Progress], None], cancelled: threading.Event
    ) -> TrialResult | None:
        """Run one trial to its end; return None if `cancelled` was set."""

    def submit(self, trial: Trial) -> None:
        """Start `trial` as soon as a slot is free; returns at once.

        Raises:
            ValueError: The executor is closed, or a trial of that number is still running.
        """
        if self._closed or trial.number in self._tickets:
            raise ValueError(
                f"trial {trial.number} cannot start: " + ("closed" if self._closed else "it is running")
            )
        ticket = self._tickets[trial.number] = _Ticket(trial)
        self._todo.put(ticket)

    def wait(self, timeout_s: float) -> Iterator[Progress | TrialResult]:
        """Yield events since the last call, waiting up to `timeout_s` for the first one.

        Raises:
            EnvironmentFault: The machine or the cluster does not allow a trial to run.
        """
        try:
            ticket, event = self._events.get(timeout=timeout_s)
            while True:
                if not ticket.cancelled.is_set():
                    if not isinstance(event, Progress):
                        self._tickets.pop(ticket.trial.number, None)
                    if isinstance(event, BaseException):
                        raise event
                    yield event
                ticket, event = self._events.get_nowait()
        except queue.Empty:
            return

    def cancel(self, number: int) -> None:
        """End a running trial and return when all its processes are gone; it yields no result."""
        if ticket := self._tickets.pop(number, None):
            ticket.cancelled.set()
            # One that waits in the queue has no processes yet; its thread drops it.
            if ticket.started:
                ticket.done.wait(CANCEL_S)

    def close(self) -> None:
        """End all running trials; no process survives. May be called twice."""
        self._closed = True
        # Else the registration would keep the executor alive.
        atexit.unregister(self.close)
        tickets = list(self._tickets.values())
        for ticket in tickets:
            ticket.cancelled.set()
        for _ in self._threads:
            self._todo.put(None)
        for thread in self._threads:
            thread.join(CANCEL_S)
        self._tickets.clear()

    def _serve(self, slot: int) -> None:
        while ticket := self._todo.get():
            ticket.started = True
            if not ticket.cancelled.is_set():
                self._serve_one(ticket, slot)
            ticket.done.set()

    def _serve_one(self, ticket: _Ticket, slot: int) -> None:
        def tell(event: Progress | TrialResult | BaseException) -> None:
            self._events.put((ticket, event))

        try:
            result = self._run(ticket.trial, slot, tell, ticket.cancelled)
        except BaseException as error:  # raised again by `wait`, in the thread that can do something about it
            tell(error)
        else:
            if result is not None:
                tell(result)

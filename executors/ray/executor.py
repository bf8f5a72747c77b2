"""Trials on a Ray cluster.

A placement group per trial, an actor per rank, and below each actor a supervisor with fresh processes.

Ray is imported when a RayExecutor is created, not before.

Rules:

1. Without an address the executor starts a private cluster and joins no other, whatever the environment or
  files say.
2. Ray does not clean up after a kill. An actor holds the pipe of its supervisor, so descendants of an actor
  die with it; the private cluster as a whole is below a supervisor of the driver (`cluster.py`). If it ends,
  the next trial starts another.
3. An actor loads neither torch nor the user's code.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from memtune._optional import require
from memtune.device import platform_of
from memtune.errors import EnvironmentFault
from memtune.executors import (
    CLOSE_S,
    SILENCE_S,
    WORKER,
    Event,
    LocalRanks,
    Place,
    PoolExecutor,
    Progress,
    RankLost,
    Trial,
    TrialResult,
    last_line,
    make_log_dir,
    run_monitored,
)
from memtune.executors.ray.cluster import Cluster, access, bundles, side_by_side
from memtune.hardware import threads_per_rank, usable_cores
from memtune.ssd import RunFolder

_ENDED = "was lost: the Ray cluster has ended"


class RankActor:
    """Runs in a Ray worker and owns the processes of one rank."""

    def where(self) -> tuple[str, str, int]:
        """Return the id of the node, its address, and a free port on it."""
        ray = require("ray")
        with socket.socket() as probe:
            probe.bind(("", 0))
            return (
                ray.get_runtime_context().get_node_id(),
                ray.util.get_node_ip_address(),
                probe.getsockname()[1],
            )

    def begin(
        self, trial: str, command: Sequence[str], log_dir: str, cwd: str, place: Mapping[str, Any], share: int
    ) -> None:
        """Start the rank; it gets one part in `share` of the processor cores of this node."""
        with contextlib.suppress(OSError):
            os.chdir(cwd)
        folder = make_log_dir(log_dir)
        # Ray sets this to 1, which would starve an optimizer on the host.
        threads = {"OMP_NUM_THREADS": str(threads_per_rank(usable_cores(), share))}
        there = Place(**{**place, "env": {**threads, **place["env"]}})
        self._ranks = LocalRanks(Trial.model_validate_json(trial), command, folder, there)

    def events(self, timeout_s: float) -> tuple[list[Event], bool]:
        """Return the events, and whether they are the last ones."""
        found = self._ranks.events(timeout_s)
        return found, self._ranks.gone

    def stop(self, dump: bool, grace_s: float) -> None:
        """Stop as `LocalRanks.stop` does."""
        self._ranks.stop(dump=dump, grace_s=grace_s)

    def close(self) -> None:
        """Close as `LocalRanks.close` does."""
        if hasattr(self, "_ranks"):
            self._ranks.close()


class RayRanks:
    """The ranks of one trial, one actor each; implements `monitor.Ranks`.

    Args:
        executor: Provides cluster, command and folders.
        trial: The trial to run.
        cancelled: Ends the wait for room on the cluster.
    """

    def __init__(self, executor: RayExecutor, trial: Trial, cancelled: threading.Event) -> None:
        self._ray, self._executor = executor.ray, executor
        self._actors: dict[int, Any] = {}
        self._polls: dict[Any, int] = {}
        self._early: list[Event] = []
        self._closed = False
        self._group: Any = None
        kind = platform_of(trial.device).ray_resource
        executor.enter()
        try:
            self._bundles = bundles(trial.ranks, executor.nodes(kind))
            self._group = self._ray.util.placement_group(
                [{kind: size} for size in self._bundles], strategy="PACK"
            )
            while not self._ray.wait([self._group.ready()], timeout=0.2)[0]:
                if cancelled.is_set() or not executor.alive:
                    self._early += [RankLost(rank, _ENDED) for rank in range(trial.ranks)]
                    return
            self._begin(executor, trial)
        except BaseException:
            self.close()
            raise

    def _begin(self, executor: RayExecutor, trial: Trial) -> None:
        strategy = self._ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy
        actor = self._ray.remote(RankActor)
        kind = platform_of(trial.device).ray_resource
        at = [index for index, size in enumerate(self._bundles) for _ in range(size)]
        for rank in range(trial.ranks):
            self._actors[rank] = actor.options(
                num_cpus=int(kind == "CPU"),
                num_gpus=int(kind == "GPU"),
                resources={} if kind in ("CPU", "GPU") else {kind: 1},
                scheduling_strategy=strategy(self._group, placement_group_bundle_index=at[rank]),
            ).remote()
        places = {rank: self._get(rank, each.where.remote()) for rank, each in self._actors.items()}
        if self._early:
            return
        nodes = [node for node, _, _ in places.values()]
        _, address, port = places[0]
        own = executor.cluster
        # A file where all ranks share this machine: a port could be reached by others.
        rendezvous = f"file://{own.folder}/meet-{uuid.uuid4().hex}" if own else f"tcp://{address}:{port}"
        begun = {}
        for rank, each in self._actors.items():
            place = {"ranks": [rank], "rendezvous": rendezvous, "env": executor.env}
            # A node's cores are shared by the trials that its devices can hold.
            trials = 1 if trial.alone else executor.trials_per_node(self._bundles[0], kind)
            share = trials * nodes.count(places[rank][0])
            command, log_dir = list(executor.command), str(executor.log_dir)
            begun[rank] = each.begin.remote(
                trial.model_dump_json(), command, log_dir, os.getcwd(), place, share
            )
        for rank, started in begun.items():
            self._get(rank, started)
        for rank in self._actors:
            self._poll(rank)

    def _get(self, rank: int, reference: Any) -> Any:
        """Return the answer of an actor; None, and a `RankLost` event, if it has died.

        Raises:
            EnvironmentFault: As the actor raised it.
        """
        try:
            return self._ray.get(reference)
        except self._ray.exceptions.RayTaskError as error:
            raise error.cause if isinstance(error.cause, EnvironmentFault) else error from None
        except self._ray.exceptions.RayError as error:
            why = last_line(str(error).partition("The actor never ran")[0]) or type(error).__name__
            self._early.append(RankLost(rank, f"was lost with its Ray worker: {why}"))
            return None

    def _poll(self, rank: int) -> None:
        # One call in flight for each actor; the next follows its answer, so that events keep their order.
        self._polls[self._actors[rank].events.remote(0.2)] = rank

    @property
    def gone(self) -> bool:
        """Return whether all ranks have ended and all events were read."""
        return not self._polls and not self._early

    @property
    def core_wait_s(self) -> float:
        """Return 0: other nodes are not asked."""
        return 0.0

    def events(self, timeout_s: float) -> list[Event]:
        """Return the ranks' reports and exits since the last call, waiting `timeout_s` for the first."""
        stop_s = time.monotonic() + timeout_s
        while self._polls and not self._early:
            if not self._executor.alive:
                self._early += [RankLost(rank, _ENDED) for rank in sorted(self._polls.values())]
                self._polls.clear()
                break
            wait_s = max(0.0, stop_s - time.monotonic())
            for reference in self._ray.wait(list(self._polls), timeout=wait_s)[0]:
                rank = self._polls.pop(reference)
                if answer := self._get(rank, reference):
                    found, gone = answer
                    self._early += found
                    if not gone:
                        self._poll(rank)
            if time.monotonic() >= stop_s:
                break
        found, self._early = self._early, []
        return found

    def stop(self, *, dump: bool, grace_s: float) -> None:
        """Ask all processes to end, dumping stacks first if `dump`; they are killed after the grace."""
        for actor in self._actors.values() if self._executor.alive else ():
            actor.stop.remote(dump, grace_s)

    def close(self) -> None:
        """Kill remaining processes, end the actors and release their placement group."""
        if self._closed:
            return
        self._closed = True
        try:
            if self._executor.alive and self._group is not None:
                closing = [actor.close.remote() for actor in self._actors.values()]
                if closing:
                    self._ray.wait(closing, num_returns=len(closing), timeout=CLOSE_S)
                for actor in self._actors.values():
                    self._ray.kill(actor)
                self._ray.util.remove_placement_group(self._group)
        finally:
            self._actors.clear()
            self._polls.clear()
            self._executor.leave()


class RayExecutor(PoolExecutor):
    """Runs each trial in fresh processes below the workers of a Ray cluster.

    Args:
        address: Cluster to join, as for `ray.init`; None starts one on this machine that ends with the
            executor.
        slots: Number of concurrent trials, which wait for room; None for as many as have GPUs of their own.
        ranks: Most ranks of one trial; sizes the private cluster if trials run on CPUs.
        resource: Ray's name of the devices of which trials get their own.
        log_dir: Folder for the output of the ranks, created on each node; when None one that `close` removes
            on this one.
        command: Program and arguments of one rank.
        silence_s: Once steps are made, a rank silent for longer than this and than 20 steps has hung.

    Raises:
        EnvironmentFault: Ray is missing, does not start, cannot be joined, or is configured to run without
            tokens.
    """

    name = "ray"

    def __init__(
        self,
        address: str | None = None,
        *,
        slots: int | None = 1,
        ranks: int = 2,
        resource: str = "GPU",
        log_dir: Path | str | None = None,
        command: Sequence[str] = WORKER,
        silence_s: float = SILENCE_S,
    ) -> None:
        # Ray prints the death of a worker to standard output, log_to_driver or not; it reads how when it is
        # imported.
        with _environment({"RAY_DEDUP_LOGS": "1", "RAY_DEDUP_LOGS_SKIP_REGEX": "."}):
            self.ray = require("ray")
        require("ray.util.scheduling_strategies")
        self._temporary = RunFolder.temporary() if log_dir is None else None
        self.log_dir = make_log_dir(self._temporary.path if self._temporary else log_dir or "").resolve()
        self.command, self._silence_s = tuple(command), silence_s
        own = ("OMP_NUM_THREADS", "MEMTUNE_OFFLOAD_DIR") if address is None else ()
        self.env = {name: os.environ[name] for name in own if name in os.environ}
        self.cluster: Cluster | None = None
        """The private cluster; None if an existing one was joined."""
        self._cpus, self._users, self._changed = (slots or 1) * ranks, 0, threading.Condition()
        if address is None and (mode := os.environ.get("RAY_AUTH_MODE", "token")).lower() != "token":
            what = "Ray would let anyone on the network run code here."
            fix = "unset RAY_AUTH_MODE, or --executor local"
            raise EnvironmentFault(what, evidence=f"RAY_AUTH_MODE={mode}", fix=fix, code="MT512")
        if self.ray.is_initialized():
            raise EnvironmentFault(
                "Ray is in use in this process already.", fix="end it with ray.shutdown()", code="MT511"
            )
        try:
            if address is None:
                self._start()
            else:
                self._join(address)
            slots = slots or max(1, side_by_side(ranks, self.nodes(resource)))
        except BaseException:
            self._end()
            raise
        super().__init__(slots)

    @property
    def alive(self) -> bool:
        """Return whether the private cluster runs; a joined one is assumed to."""
        return self.cluster is None or self.cluster.alive

    def enter(self) -> None:
        """Start using the cluster; a private one that has ended is replaced once it is unused."""
        with self._changed:
            # Ray has one connection per process: a new cluster has to wait until no trial uses the old one.
            while not self.alive:
                if self._users == 0:
                    self._end()
                    self._start()
                else:
                    self._changed.wait(1.0)
            self._users += 1

    def leave(self) -> None:
        """End the use that `enter` started."""
        with self._changed:
            self._users -= 1
            self._changed.notify_all()

    def _start(self) -> None:
        self.cluster = Cluster(self._cpus)
        with _environment(access()):
            # Ray reads the mode when it is imported, and reads it again just so when it starts a cluster
            # itself.
            require("ray._raylet").Config.initialize("")
            self._join(self.cluster.address)

    def _join(self, address: str) -> None:
        """Call `ray.init` quietly, and keep the process' own handler of SIGTERM."""
        main = threading.current_thread() is threading.main_thread()
        on_term = signal.getsignal(signal.SIGTERM)
        job = self.ray.job_config.JobConfig()
        # Else Ray puts the working directory first on the path of its workers, where a user's `statistics.py`
        # is Python's.
        job._client_job = True
        try:
            self.ray.init(address=address, job_config=job, log_to_driver=False, logging_level=logging.ERROR)
        except (self.ray.exceptions.RayError, RuntimeError, ValueError, OSError) as error:
            fix = (
                "check --ray-address; where the cluster asks for a token, set RAY_AUTH_MODE=token and"
                " RAY_AUTH_TOKEN"
            )
            what = f"The Ray cluster at {address} cannot be joined."
            raise EnvironmentFault(what, evidence=last_line(str(error)), fix=fix, code="MT514") from error
        finally:
            if main:
                signal.signal(signal.SIGTERM, on_term)

    def _run(
        self, trial: Trial, slot: int, on_progress: Callable[[Progress], None], cancelled: threading.Event
    ) -> TrialResult | None:
        kind = platform_of(trial.device).ray_resource
        there = self._count(kind)
        if there < trial.ranks:
            reason = f"needs {trial.ranks} {kind}s; the Ray cluster has {there}"
            return TrialResult(number=trial.number, status="unfit", reason=reason)
        return run_monitored(
            trial,
            lambda: RayRanks(self, trial, cancelled),
            on_progress=on_progress,
            cancelled=cancelled,
            silence_s=self._silence_s,
        )

    def _count(self, kind: str) -> int:
        self.enter()
        try:
            return sum(self.nodes(kind))
        finally:
            self.leave()

    def nodes(self, kind: str) -> list[int]:
        """Return the devices of each node of the cluster that has any: `GPU`s, `NPU`s or `CPU`s."""
        if self.cluster is not None and kind == "CPU":
            return [self._cpus]
        found = [int(each["Resources"].get(kind, 0)) for each in self.ray.nodes() if each["Alive"]]
        return [each for each in found if each]

    def trials_per_node(self, ranks: int, kind: str) -> int:
        """Return the number of trials, each of `ranks` on devices of `kind`, that share a node."""
        if kind == "CPU":
            return self.slots
        return min(self.slots, max(1, max(self.nodes(kind), default=1) // ranks))

    def close(self) -> None:
        """End all running trials, and the private cluster; no process survives. May be called twice."""
        super().close()
        self._end()

    def _end(self) -> None:
        self.ray.shutdown()
        if self.cluster is not None:
            self.cluster.close()
        if self._temporary is not None:
            self._temporary.remove()


@contextlib.contextmanager
def _environment(settings: Mapping[str, str]) -> Iterator[None]:
    """Set `settings` in the environment, for processes started inside."""
    before = {name: os.environ.get(name) for name in settings}
    os.environ.update(settings)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value

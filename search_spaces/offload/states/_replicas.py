"""What techniques share that several ranks use as replicas alone: each with all parameters, beside `ddp`."""

from __future__ import annotations

from memtune.errors import ApplyError
from memtune.runtime.context import Context
from memtune.technique import Reason, Target


def not_replicas(target: Target, what: str) -> Reason | None:
    """Why ranks are no replicas that have all of `what`; None on one rank."""
    states = target.chosen.get("sharding.states") if target.ranks > 1 else None
    if target.ranks == 1 or (states is not None and states.kind == "ddp"):
        return None
    return Reason(f"{what} are for replicas on several ranks", "sharding: {states: {kind: ddp}}")


def require_ddp(context: Context, what: str) -> None:
    """Refuse what `not_replicas` refuses: a config may say it all the same."""
    if context.ranks > 1 and (context.runner is None or context.parts > 1):
        raise ApplyError(
            f"{what} are for replicas on several ranks.",
            fix="sharding: {states: {kind: ddp}, parallel: {kind: none}}", code="MT364",
        )  # fmt: skip

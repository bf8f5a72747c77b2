"""An optimizer's `state` whose reader waits for the updates under way: what it shows is the last step's, as in a plain run.

Two rules:

Rule 1. Every way to a value settles first: by key, by iteration, by copy, by pickle. So `copy.deepcopy(optimizer)` and
        `torch.save(optimizer)` settle, since both take the state before the groups; copies are plain ones, and wait for nobody.
Rule 2. The runtime itself, which makes state and starts the updates, reads it as it is (`as_it_is`).

Values that somebody has kept since an earlier step, and those of parameters read through `param_groups`, are not waited for.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch.optim import Optimizer


class SettledState(defaultdict[Any, Any]):
    """Holds what `optimizer.state` held.

    Args:
        held: The state so far.
        settle: Waits until all of it is that of the last step.
    """

    def __init__(self, held: dict[Any, Any], settle: Callable[[], None]) -> None:
        super().__init__(dict, held)
        self._settle, self._as_it_is = settle, False

    def settle(self) -> None:
        """Rule 1."""
        if not self._as_it_is:
            with self.as_it_is():
                self._settle()

    @contextmanager
    def as_it_is(self) -> Iterator[None]:
        """Rule 2."""
        before, self._as_it_is = self._as_it_is, True
        try:
            yield
        finally:
            self._as_it_is = before

    def __getitem__(self, key: Any) -> Any:
        self.settle()
        return super().__getitem__(key)

    def __iter__(self) -> Iterator[Any]:
        self.settle()
        return super().__iter__()

    def __reduce__(self) -> Any:
        self.settle()
        return defaultdict, (dict,), None, None, iter(list(super().items()))

    def get(self, *args: Any) -> Any:
        """As a dict's; so are those that follow."""
        self.settle()
        return super().get(*args)

    def pop(self, *args: Any) -> Any:  # noqa: D102
        self.settle()
        return super().pop(*args)

    def setdefault(self, *args: Any) -> Any:  # noqa: D102
        self.settle()
        return super().setdefault(*args)

    def keys(self) -> Any:  # noqa: D102
        self.settle()
        return super().keys()

    def values(self) -> Any:  # noqa: D102
        self.settle()
        return super().values()

    def items(self) -> Any:  # noqa: D102
        self.settle()
        return super().items()

    def copy(self) -> Any:
        """A plain one."""
        self.settle()
        return defaultdict(dict, super().items())

    def __or__(self, other: Any) -> Any:
        return self.copy() | other

    def __ror__(self, other: Any) -> Any:
        return other | self.copy()

    def __repr__(self) -> str:
        return repr(self.copy())

    __copy__ = copy


def settle_reads(optimizer: Optimizer, settle: Callable[[], None]) -> None:
    """From here on whoever reads the state of `optimizer` settles, also after a state has been loaded."""

    def put(*_: Any) -> None:
        held = optimizer.state
        vars(optimizer)["state"] = SettledState(dict(dict.items(held)), settle)

    put()
    optimizer.register_load_state_dict_post_hook(put)


@contextmanager
def as_it_is(optimizer: Optimizer) -> Iterator[None]:
    """Reads of the state of `optimizer` inside wait for nobody: the runtime's own."""
    state = optimizer.state
    if not isinstance(state, SettledState):
        yield
        return
    with state.as_it_is():
        yield

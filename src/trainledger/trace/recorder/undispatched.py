"""What dispatch does not show: operators that call others, and states of the random number generator."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from trainledger.trace.patches import replaced
from trainledger.trace.recorder.events import Recording
from trainledger.trace.recorder.tensor_facts import tensors_in

_AROUND_ONE = ("run_and_save_rng_state", "run_with_rng_state", "graphsafe_run_with_rng_state", "run_dtensor_rng_op")


def run_higher_order(recorder: Recording, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run one while the recorder is off: an operator it only wraps is recorded, of any other only what it makes.

    What such an operator computes itself is listed as uncounted.
    """
    name = func.name() if callable(getattr(func, "name", None)) else str(func)
    wraps = name.rpartition("::")[2] in _AROUND_ONE
    if wraps:
        args = tuple(_recorded(recorder, each) if isinstance(each, OpOverload) else each for each in args)
    out = func(*args, **kwargs)
    made = [each for each in tensors_in(out) if recorder.storages.of(each) is None]
    if not wraps:
        recorder.uncounted[name] = recorder.uncounted.get(name, 0) + 1
    if made or not wraps:
        recorder.add(name, made, kind="copy" if wraps else "unknown", source=name)
    return out


def _recorded(recorder: Recording, operator: OpOverload) -> Any:
    def run(*args: Any, **kwargs: Any) -> Any:
        with recorder.reentered():
            return operator(*args, **kwargs)

    return run


@contextmanager
def random_states(recorder: Recording) -> Iterator[None]:
    """Inside, each state that is read off the CPU's generator is an entry: it is memory that no operation makes."""

    def recorded(before: Callable[[], Tensor]) -> Callable[[], Tensor]:
        def get_rng_state() -> Tensor:
            state = before()
            recorder.add("get_rng_state", [state], kind="random", source="get_rng_state")
            return state

        return get_rng_state

    with replaced(torch, "get_rng_state", recorded):
        yield

"""Operators that call others, as the compiler puts them around a kernel whose random numbers it must draw again."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch._ops import OpOverload

from trainledger.ledger.core.record import Event
from trainledger.trace.recorder.tensor_facts import tensors_in

if TYPE_CHECKING:
    from trainledger.trace.recorder.recorder import Recorder

_AROUND_ONE = ("run_and_save_rng_state", "run_with_rng_state", "graphsafe_run_with_rng_state", "run_dtensor_rng_op")


def run_higher_order(recorder: Recorder, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run one while the recorder is off: an operator it only wraps is recorded, of any other only what it makes.

    Whatever such an operator computes itself is listed as uncounted.
    """
    name = func.name() if callable(getattr(func, "name", None)) else str(func)
    wraps = name.rpartition("::")[2] in _AROUND_ONE
    if wraps:
        args = tuple(_recorded(recorder, each) if isinstance(each, OpOverload) else each for each in args)
    out = func(*args, **kwargs)
    made = [
        recorder.storages.born(each, name, recorder.current_phase)
        for each in tensors_in(out)
        if recorder.storages.of(each) is None
    ]
    if not wraps:
        recorder.uncounted[name] = recorder.uncounted.get(name, 0) + 1
    if made or not wraps:
        phase = recorder.phase_now(made)
        recorder.events.append(
            Event(
                made, name=name, path=recorder.places.path(phase), phase=phase, kind="copy" if wraps else "unknown",
                written=sum(each.nbytes for each in made), source=name, line=recorder.places.line(),
            )
        )  # fmt: skip
    return out


def _recorded(recorder: Recorder, operator: OpOverload) -> Any:
    def run(*args: Any, **kwargs: Any) -> Any:
        with recorder.again():
            return operator(*args, **kwargs)

    return run

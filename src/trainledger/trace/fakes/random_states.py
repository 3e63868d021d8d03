"""States of the random number generator, which checkpointing saves so that dropout comes out the same again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from trainledger.ledger.core.record import Event
from trainledger.trace.patches import replaced
from trainledger.trace.recorder.recorder import Recorder


@contextmanager
def random_states(recorder: Recorder) -> Iterator[None]:
    """Inside, each state that is taken of the CPU's generator is an entry: it is memory that no operation makes."""

    def taken(before: Callable[[], Tensor]) -> Callable[[], Tensor]:
        def get_rng_state() -> Tensor:
            state = before()
            name, made = "get_rng_state", recorder.storages.born(state, "get_rng_state", recorder.current_phase)
            phase = recorder.phase_now([made])
            path, line = recorder.places.path(phase), recorder.places.line()
            event = Event(
                [made], name=name, path=path, phase=phase, kind="random", written=made.nbytes, source=name, line=line
            )
            recorder.events.append(event)
            return state

        return get_rng_state

    with replaced(torch, "get_rng_state", taken):
        yield

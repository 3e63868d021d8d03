"""What a run does about a step whose loss or gradient is not finite, and which steps it speaks of."""

from __future__ import annotations

from typing import ClassVar

from trainledger.frozen import frozen
from trainledger.spec.parts import part
from trainledger.spec.setting import setting


@frozen(kw_only=True)
class Stop:
    """The run ends with exit code 3 and a diagnosis."""

    kind: ClassVar[str] = "stop"


@frozen(kw_only=True)
class RollBack:
    """The newest good checkpoint from before the first of these steps, and from there other data than before.

    All batches from that checkpoint to the last bad step are left out (Chowdhery et al. 2022, PaLM, section 5.1).
    """

    kind: ClassVar[str] = "roll-back"

    times: int = setting("roll-backs of a run; the next one ends it with exit code 3", default=3, at_least=1)


@frozen(kw_only=True)
class Guard:
    """Steps with a loss or gradient that is not finite: their update is left out, but not endlessly."""

    skips: int = setting(
        "steps of a window that are left out because loss or gradient is not finite; 0 = none", default=3, at_least=0
    )
    window: int = setting("steps of a window", default=100, at_least=1)
    beyond: Stop | RollBack = part(
        "what one more than that leads to: stop = the end (exit code 3), roll-back = the newest good checkpoint and "
        "other data from there",
        Stop, RollBack, default=Stop(),
    )  # fmt: skip


@frozen(kw_only=True)
class Watch:
    """Steps whose loss or gradient norm is far above what it was lately are told, with the documents of their batch.

    Their update is made all the same: this says nothing of what a run computes.
    """

    deviations: float | None = setting(
        "told is what is more than this many median absolute deviations above the median of the window; none = nothing",
        quantity="number", default=10.0, above=0,
    )  # fmt: skip
    window: int = setting("steps of a window", default=100, at_least=5, at_most=10_000)

"""What a run does about a step whose loss or gradient is not finite, and which steps it speaks of."""

from __future__ import annotations

from typing import ClassVar

from trainledger.spec.frozen import frozen
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
        "steps of a window that may be skipped because loss or gradient is not finite; 0 = none", default=3, at_least=0
    )
    window: int = setting("steps of a window", default=100, at_least=1)
    beyond: Stop | RollBack = part(
        "the action on one more: stop = end with exit code 3, roll-back = continue from the newest good checkpoint "
        "with other data",
        Stop, RollBack, default=Stop(),
    )  # fmt: skip


@frozen(kw_only=True)
class Watch:
    """Which steps with a loss or gradient norm far above recent ones are reported, with the documents of their batch.

    Their update is made all the same: this says nothing of what a run computes.
    """

    deviations: float | None = setting(
        "a value is reported if it exceeds the window's median by more than this many median absolute deviations; "
        "none = never",
        quantity="number", default=10.0, above=0,
    )  # fmt: skip
    window: int = setting("steps of a window", default=100, at_least=5, at_most=10_000)

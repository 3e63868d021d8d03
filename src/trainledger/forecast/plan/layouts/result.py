"""What a search for layouts gives: the best ones, what they cost in memory, and why others were left out."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields

from trainledger.report.document import Answer
from trainledger.spec.convert.patch import Rewritten
from trainledger.spec.frozen import frozen
from trainledger.spec.layout import overlaps
from trainledger.spec.parts import table_of
from trainledger.spec.problem import Problem
from trainledger.spec.run import Run
from trainledger.spec.run_text import as_override
from trainledger.spec.setting import NONE
from trainledger.spec.units import format_count, format_nbytes, format_seconds

AS_QUICK = 1.03  # times are known to about 5 %: what takes this much longer is as quick


@frozen
class ScoredLayout:
    """A layout and its result; ``run`` is the run with it, to be planned or stored.

    ``seconds`` of a step and ``device_nbytes`` (all memory of the peak rank) are those of its account,
    ``bound_seconds`` and ``bound_nbytes`` what the search took them to be at least. ``mfu`` is by the dense convention.
    """

    run: Run
    seconds: float
    device_nbytes: int
    peak_nbytes: int
    mfu: float | None
    bound_seconds: float
    bound_nbytes: float

    def __repr__(self) -> str:
        return f"ScoredLayout({self.title}: {format_seconds(self.seconds)}, {format_nbytes(self.device_nbytes)})"

    @property
    def simplicity(self) -> tuple[int, int]:
        """Kinds of ranks, and demands on a program that sends tokens to experts: the fewer the simpler."""
        layout = self.run.layout
        return layout.kinds_of_ranks, layout.sends_to_nodes + overlaps(layout, "experts")

    @property
    def title(self) -> str:
        """The layout in words, defaults left out."""
        recipe = self.run.recipe
        again = f"recompute {recipe.activation_checkpointing.kind}"
        return ", ".join([*_said(self.run), f"micro_batch {recipe.micro_batch}", again])

    @property
    def settings(self) -> tuple[str, ...]:
        """The layout as overrides for ``--set``."""
        run = self.run
        found = [as_override(f"layout.{name}", value) for name, value in _changed(run)]
        again = run.recipe.activation_checkpointing.kind
        return (*found, f"recipe.micro_batch={run.recipe.micro_batch}", f"recipe.activation_checkpointing={again}")

    @property
    def toml(self) -> str:
        """The layout as lines of a run file."""
        return as_toml(self.run)


@frozen
class Rejected:
    """So many layouts for the same reason."""

    reason: str
    count: int


@frozen
class Gap:
    """How far bounds were below the accounts, as shares of those: the least, the median and the most."""

    least: float
    median: float
    most: float


@frozen
class Layouts(Answer, report="layouts"):
    """The layouts of a run on so many devices, best first.

    Of ``searched`` in the grid, ``allowed`` obey every rule, ``fitting`` may fit by their bounds; ``accounted`` were
    accounted for exactly, best bounds first. ``certain`` says that no other can be among
    the ``ranked``, if bounds hold. ``simplest`` takes at most 3 % longer than the quickest and has the fewest kinds of
    ranks of those (`Layout.kinds_of_ranks`), of as many those whose experts' tokens go the plainest way; ``layout =
    "auto"`` takes it. CPU seconds: ``preparing_seconds`` went into the grid and the pieces that bounds are made of,
    ``bounding_seconds`` into the bounds, ``accounting_seconds`` into the accounts. ``interrupted`` says that Ctrl-C
    ended those. ``basis`` is that of the seconds, as a forecast says it. ``problem`` says why there is no layout;
    ``words`` are the best one in the words of the trainer's file that the run is of.
    """

    run: Run
    device: str
    devices: int
    searched: int
    allowed: int
    fitting: int
    accounted: int
    certain: bool
    ranked: tuple[ScoredLayout, ...]
    simplest: ScoredLayout | None
    pareto: tuple[ScoredLayout, ...]
    rejected: tuple[Rejected, ...]
    seconds_gap: Gap | None
    nbytes_gap: Gap | None
    preparing_seconds: float
    bounding_seconds: float
    accounting_seconds: float
    usable_nbytes: int | None
    notes: tuple[str, ...] = ()
    interrupted: bool = False
    basis: str = "assumed"
    problem: Problem | None = None
    words: Rewritten | None = None

    def __repr__(self) -> str:
        best = self.ranked[0] if self.ranked else "none fits"
        searched = format_count(self.searched)
        return f"Layouts({self.devices:,} x {self.device}, {searched} searched, {self.fitting:,} fit, best={best})"

    @property
    def best(self) -> ScoredLayout | None:
        """The quickest that fits; None where none does."""
        return self.ranked[0] if self.ranked else None

    @property
    def layouts_per_second(self) -> float:
        """Layouts bounded in memory and time in a second of one core."""
        return self.allowed / self.bounding_seconds if self.bounding_seconds else 0.0


def as_toml(run: Run) -> str:
    """The layout of a run, with what goes with it of the recipe, as lines of a run file; defaults left out."""
    lines = ["[layout]", *(f"{name} = {_quoted(value)}" for name, value in _changed(run))]
    if run.recipe.micro_batch is not None:
        lines += ["", "[recipe]", f"micro_batch = {run.recipe.micro_batch}"]
        again = table_of(run.recipe.activation_checkpointing)
        lines += [f"activation_checkpointing.{name} = {_quoted(value)}" for name, value in again.items()]
    return "\n".join(lines)


def _changed(run: Run) -> Iterator[tuple[str, object]]:
    """The fields of a layout that are not as by default."""
    for field in fields(run.layout):
        value = getattr(run.layout, field.name)
        if value != field.default:
            yield field.name, value


def _said(run: Run) -> Iterator[str]:
    layout = run.layout
    if layout.alone:
        yield "one device"
    for name, value in _changed(run):
        if name == "stage_layers":
            sizes = layout.stage_layers or ()
            yield f"{min(sizes)} to {max(sizes)} layers a stage"
        elif value is True:
            yield name
        elif name == "overlap":
            yield f"{name} {' + '.join(layout.overlap or (NONE,))}"
        else:
            yield f"{name} {value}"


def _quoted(value: object) -> str:
    if isinstance(value, tuple | list):
        return f"[{', '.join(map(_quoted, value))}]"
    if isinstance(value, bool):
        return str(value).lower()
    return str(value) if isinstance(value, int) else f'"{value or NONE}"'

"""The lines of an account: memory, FLOPs, parameters and time, each with its formula.

An account of symbols has formulas in letters. One of numbers alone (`of_numbers`) has how often each amount comes, and
needs no sympy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import reduce
from operator import mul
from typing import Any

from trainledger.forecast.explain.symbols import Symbolic, expanded, formula, named_heads, settled, with_numbers
from trainledger.forecast.predict.device_memory import DeviceMemory
from trainledger.forecast.predict.forecast import OF_CAUSES
from trainledger.forecast.predict.roofline import EntryTime, moved_nbytes
from trainledger.forecast.predict.step import StepTime
from trainledger.ledger.core.graph import component_of
from trainledger.ledger.core.sizes import added
from trainledger.ledger.entry import Entry
from trainledger.ledger.ledger import Ledger
from trainledger.ledger.memory.timeline import Moment, highest_by_category, timeline
from trainledger.ledger.model.parameters import named_shapes
from trainledger.ledger.parallel.schedule import in_flight
from trainledger.spec.frozen import frozen
from trainledger.spec.run import Run
from trainledger.spec.units import format_flops, format_flops_per_second, format_nbytes, format_seconds

# What a rule rests on, by the kind of operation it counts.
SOURCES = {
    "matmul": "2 m n k (rules.matmul_flops)",
    "attention": "rules.attention_flops; Dao et al. 2022, FlashAttention, appendix B",
    "norm": "rules.FLOPS_PER_ELEMENT: operations in its definition",
    "softmax": "rules.FLOPS_PER_ELEMENT: operations in its definition",
    "elementwise": "one per element",
    "reduction": "one per element",
    "update": "update_rules.RULES: operations in the optimizer's definition",
}
_AMOUNTS = {"flops": "FLOPs", "kept": "bytes"}
ROOFLINE = "the larger of FLOPs / FLOP/s and bytes / bytes/s (predict.roofline)"
LINKS = "the fastest algorithm of the library over these links (predict.collective)"
KEPT = "what autograd saves for the backward of the operation, each piece of memory once"


@frozen
class Line:
    """One line: what it is, its formula, the formula with its numbers, its value, and how it is known."""

    what: str
    formula: str
    numbers: str
    value: float
    basis: str
    source: str


@frozen
class Part:
    """Lines that add up, and their sum."""

    title: str
    lines: tuple[Line, ...]
    total: float


def part(title: str, lines: Iterable[Line]) -> Part:
    """Lines under a title, with their sum."""
    lines = tuple(lines)
    return Part(title, lines, sum(line.value for line in lines))


def of_numbers(run: Run, ledger: Ledger, stage: int = 0) -> Symbolic:
    """The account of a ledger without symbols, of a rank of a stage."""
    return Symbolic(ledger, {}, run, stage)


def parameters(symbolic: Symbolic) -> tuple[Part, ...]:
    """Each parameter by name: its shape, times how often it comes."""
    sums: dict[str, Any] = {}
    shapes: dict[str, list[str]] = {}
    for name, shape, times in named_shapes(symbolic.run.model):
        sums[name] = sums.get(name, 0) + named_heads(reduce(mul, shape, 1) * times)
        shapes.setdefault(name, []).append(_product(times, *shape))
    lines = tuple(
        _line(symbolic, name, total, "exact", component_of(name), ("times x sizes", " + ".join(shapes[name])))
        for name, total in sums.items()
    )
    return (part("parameters", lines),)


def flops(symbolic: Symbolic) -> tuple[Part, ...]:
    """The FLOPs of a step: matmuls and attention by module and phase, pointwise work by kind."""
    matmuls = _grouped(
        symbolic,
        "flops",
        lambda entry: entry.kind in ("matmul", "attention"),
        lambda entry: f"{entry.path or 'model'} {entry.name}, {entry.phase}",
        lambda entry: SOURCES[entry.kind],
    )
    rest = _grouped(
        symbolic,
        "flops",
        lambda entry: entry.kind not in ("matmul", "attention"),
        lambda entry: f"{entry.kind}, {entry.phase}",
        lambda entry: SOURCES.get(entry.kind, entry.source),
    )
    return (part("matmuls and attention", matmuls), part("all else", rest))


def memory(symbolic: Symbolic, moments: Sequence[Moment] = ()) -> tuple[Part, ...]:
    """Static memory, saved activations of the micro-batches in flight, and what the peak is made of.

    A step of several micro-batches has one of them alive at once, a rank of a pipeline those in flight. The ``moments``
    of the step are given where they are known already.
    """
    resident = tuple(
        _line(
            symbolic,
            category,
            nbytes,
            "exact",
            "alive in every step: ledger.step",
            _per_element(symbolic, category, nbytes),
        )
        for category, nbytes in symbolic.ledger.resident
    )
    kept = _grouped(
        symbolic, "kept", _is_kept, lambda entry: f"{entry.path or 'model'} {entry.name}", lambda each: KEPT
    )
    # The moment of the formulas that is the peak with the run's numbers.
    numbers = max(moments or timeline(symbolic.ledger), key=lambda moment: symbolic.number(moment.nbytes))
    where = f"at {numbers.entry.name} of {numbers.entry.path or 'the update'}"
    at_peak = tuple(
        _line(symbolic, category, nbytes, "exact", where)
        for category, nbytes in numbers.live.items()
        if symbolic.number(nbytes)
    )
    return (
        part("resident before the step", resident),
        part(_title_of_kept(symbolic), kept),
        part(f"the peak, {where}, {numbers.entry.phase}", at_peak),
    )


def outside_tensors(held: DeviceMemory) -> Part:
    """What a device holds at the peak in addition to tensors; without lines where nothing of it is known."""
    others = (line for line in held.lines if line.name != "tensors")
    return part(
        "outside the tensors", (Line(line.name, "", "", line.nbytes, line.basis, line.source) for line in others)
    )


_OF_EACH = ("parameters", "gradients", "optimizer state")  # of each trained element
STATES = ("frozen weights", *_OF_EACH)


def states(symbolic: Symbolic) -> tuple[Line, ...]:
    """The most bytes of a step in each of `STATES` that a rank has, of an account of numbers."""
    most = highest_by_category(symbolic.ledger)
    return tuple(
        _line(
            symbolic,
            name,
            most[name],
            "exact",
            "the most in a step: ledger.step",
            _per_element(symbolic, name, most[name]),
        )
        for name in STATES
        if most.get(name)
    )


def saved(symbolic: Symbolic) -> Line:
    """The bytes that the forwards keep which are alive at once, of an account of numbers: loops times their rounds."""
    rounds = added(
        (tuple(f"{count:,} {name.rstrip(' 0123456789')}" for name, count in entry.loop if count > 1), entry.kept)
        for entry in symbolic.ledger
        if _is_kept(entry) and entry.kept
    )
    numbers = " + ".join(" x ".join([*loops, format_nbytes(nbytes)]) for loops, nbytes in rounds.items())
    total = sum(entry.kept * entry.times for entry in symbolic.ledger if _is_kept(entry))
    return Line("saved activations", "times x bytes of a round", numbers or "0", total, "exact", KEPT)


def _is_kept(entry: Entry) -> bool:
    """A forward of a micro-batch that begins before earlier ones are over (`ledger.parallel.micro_batches`)."""
    return entry.phase == "forward" and not any(name.startswith("micro-batches") for name, _ in entry.loop)


def _title_of_kept(symbolic: Symbolic) -> str:
    layout, micro_batches = symbolic.run.layout, symbolic.number(symbolic.ledger.micro_batches)
    of, chunks = "micro-batches", layout.virtual_stages
    if micro_batches * chunks == 1:
        return "kept by the forward of a step"
    if chunks > 1:
        of = "forwards of a chunk of layers"
    alive = in_flight(layout, symbolic.stage, micro_batches)
    return f"kept by the forward, alive at once: {alive:,} of {micro_batches * chunks:,} {of}"


def time(step: StepTime) -> tuple[Part, ...]:
    """The predicted seconds of a step by cause, then its operations by phase: of each what bounds it."""
    parts: dict[str, dict[tuple[str, str, str], list[EntryTime]]] = {}
    for entry in step.entries:
        kind = "" if entry.entry.kind == "unknown" else entry.entry.kind  # waiting is no operation
        key = (entry.entry.path or kind, entry.entry.name, entry.bound)
        parts.setdefault(entry.entry.phase, {}).setdefault(key, []).append(entry)
    causes = tuple(
        Line(cause, OF_CAUSES[cause]["means"], "", seconds, step.basis, "predict.step.causes_of")
        for cause, seconds in step.causes.items()
        if seconds
    )
    return (
        part("the step by cause", causes),
        *_messages(step),
        *(
            Part(
                phase,
                tuple(
                    Line(f"{path} {name}".strip(), *_bound_by(bound, times), _seconds(times), step.basis, ROOFLINE)
                    for (path, name, bound), times in sorted(lines.items(), key=lambda line: -_seconds(line[1]))
                    if _seconds(times)
                ),
                sum(map(_seconds, lines.values())),
            )
            for phase, lines in parts.items()
        ),
    )


def _messages(step: StepTime) -> Iterator[Part]:
    """The collectives of a step, equal ones together; none of a step that sends nothing."""
    alike: dict[tuple[str, ...], list[EntryTime]] = {}
    for message in step.messages:
        entry = message.entry
        key = (entry.phase, entry.name, entry.group, str(entry.ranks), str(entry.payload), entry.overlap)
        alike.setdefault(key, []).append(message)
    lines = []
    for (phase, name, group, ranks, _, overlap), same in sorted(alike.items(), key=lambda each: -_seconds(each[1])):
        seconds, times = _seconds(same), sum(each.entry.times for each in same)
        if not seconds:
            continue
        nbytes = format_nbytes(same[0].entry.payload)
        when = "can overlap with compute" if overlap else "waited for"
        numbers = f"{times:,} x {nbytes} in {format_seconds(seconds / times)}, {when}"
        over = "between stages" if name in ("send", "recv") else f"{group}, {ranks} ranks"
        lines.append(Line(f"{phase} {name}, {over}", "times x time of one", numbers, seconds, step.basis, LINKS))
    if lines:
        yield part("communication of that rank, exposed and hidden", lines)


def _seconds(times: list[EntryTime]) -> float:
    return float(sum(each.seconds for each in times))


def _bound_by(bound: str, times: list[EntryTime]) -> tuple[str, str]:
    """What the seconds of operations are computed from, and the same with its numbers: what they reach together."""
    seconds = _seconds(times)
    flops = sum(each.entry.flops * each.entry.times for each in times)
    nbytes = sum(moved_nbytes(each) * each.entry.times for each in times)
    if bound == "compute" and seconds:
        return "FLOPs / rate", f"{format_flops(flops)} / {format_flops_per_second(flops / seconds)}, bound by compute"
    if bound == "memory" and seconds:
        return "bytes / rate", f"{format_nbytes(nbytes)} / {format_nbytes(nbytes / seconds)}/s, bound by memory"
    return "calls x time of a call", f"bound by {bound}"


def _grouped(
    symbolic: Symbolic,
    amount: str,
    chosen: Callable[[Entry], bool],
    label: Callable[[Entry], str],
    source: Callable[[Entry], str],
) -> tuple[Line, ...]:
    """The amounts of some entries, equal labels added, those that are zero left out; bytes of memory are exact."""
    sums: dict[str, list[Entry]] = {}
    for entry in symbolic.ledger:
        if chosen(entry):
            sums.setdefault(label(entry), []).append(entry)
    lines = []
    for what, group in sums.items():
        expression = expanded(sum(getattr(entry, amount) * entry.times for entry in group))
        if symbolic.number(expression):
            exact = amount == "kept" or all(entry.basis == "exact" for entry in group)
            one = (f"times x {_AMOUNTS[amount]}", _counted(group, amount))
            lines.append(_line(symbolic, what, expression, "exact" if exact else "assumed", source(group[0]), one))
    return tuple(lines)


def _counted(group: list[Entry], amount: str) -> str:
    """The amounts of entries that run equally often, added: ``32 x 1,024 + 64``."""
    counts = added((entry.times, getattr(entry, amount)) for entry in group)
    return " + ".join(_product(times, count) for times, count in counts.items())


def _product(*factors: Any) -> str:
    """A product in figures, without factors of one."""
    return (
        " x ".join(f"{factor:,}" if isinstance(factor, int) else str(factor) for factor in factors if factor != 1)
        or "1"
    )


def _per_element(symbolic: Symbolic, category: str, nbytes: Any) -> tuple[str, str] | None:
    """The trained elements of the rank times the bytes of each; None of what is not one of each element."""
    elements = symbolic.ledger.parameters
    if symbolic.values or category not in _OF_EACH or not elements:
        return None
    each = nbytes / elements
    return "elements x bytes each", f"{elements:,} x {each:.4g}"


def _line(
    symbolic: Symbolic, what: str, amount: Any, basis: str, source: str, in_figures: tuple[str, str] | None = None
) -> Line:
    """``in_figures`` are the formula and its numbers where the account has no symbols."""
    if in_figures is not None and not symbolic.values:
        return Line(what, *in_figures, symbolic.number(amount), basis, source)
    amount = expanded(amount)
    shown = settled(amount, symbolic.values)
    return Line(what, formula(shown), with_numbers(shown, symbolic.values), symbolic.number(amount), basis, source)

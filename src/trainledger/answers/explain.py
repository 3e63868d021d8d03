"""An explained account: every line with its formula, its numbers and its source; and its page."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, Unpack

from trainledger.answers.load import Source, resolve
from trainledger.answers.machine import device_of, kernels_of, machine_of
from trainledger.answers.pages.envelope import envelope_document
from trainledger.answers.pages.heading import heading
from trainledger.answers.pages.initialization import initialization_page
from trainledger.answers.pages.interval import fits, of_memory, of_steps
from trainledger.answers.pages.model import components_table, forward_totals
from trainledger.answers.pages.optimizer import optimizer_page, recipe_of
from trainledger.answers.pages.plain_data import plain, run_data
from trainledger.answers.question import Progress, count, nbytes, question, silent, text, word
from trainledger.answers.source import OfCluster, with_cluster
from trainledger.forecast.explain import account as explained
from trainledger.forecast.explain.account import Part
from trainledger.forecast.explain.envelope import envelope
from trainledger.forecast.explain.symbols import MEANINGS
from trainledger.forecast.explain.symbols import symbolic as with_symbols
from trainledger.forecast.predict.device_memory import DeviceMemory, memory_of_device
from trainledger.forecast.predict.interval import chance_on
from trainledger.forecast.predict.parallel_step import layout_time
from trainledger.forecast.predict.roofline import RooflineRow, roofline_table
from trainledger.ledger.model.parameters import forward_flops, leaves_of, parameters
from trainledger.ledger.ranks import accounts, heaviest
from trainledger.report.document import (
    Amount,
    Answer,
    Cell,
    Document,
    Table,
    Term,
    Terms,
    details,
    notes,
    section,
    sections,
)
from trainledger.report.table import sentence
from trainledger.spec.device import Device, ErrorModel
from trainledger.spec.frozen import frozen
from trainledger.spec.optimizers import OPTIMIZERS
from trainledger.spec.problem import InvalidInput, Problem
from trainledger.spec.reading import Overrides
from trainledger.spec.run import Run
from trainledger.spec.units import counted, format_count, format_flops, format_nbytes, format_seconds

UNITS = {"memory": "nbytes", "flops": "flops", "parameters": "count", "time": "seconds"}
_LINES = 16  # of the short answer
_KEYS = UNITS | {"parameters": "parameters"}
_LONGEST = 15  # operations and collectives of a step


@frozen
class Explained(Answer):
    """An account of a run, explained by its document."""

    run: Run | None
    written: Document

    def document(self, **options: Any) -> Document:
        return self.written


@question(plots=False)
def explain(
    what: Annotated[str, word("which account", choices=(*UNITS, "optimizer", "init"))],
    run: Source = "run.toml",
    overrides: Overrides = (),
    *,
    symbolic: Annotated[
        str | None, text("leave a size free: B sequences of a micro-batch, T tokens, A, L, D, F or V", metavar="SIZE")
    ] = None,
    memory: Annotated[
        int | None,
        nbytes(
            "memory for the tensors at the peak, such as 80GB; absent: that of the device, less what is outside them",
            metavar="BYTES",
        ),
    ] = None,
    stage: Annotated[
        int | None,
        count("the stage of a pipeline, counted from 0 (of memory the one that needs most, else 0)", least=0),
    ] = None,
    top: Annotated[
        int | None, count(f"of time: so many of the longest operations and collectives ({_LONGEST})")
    ] = None,
    progress: Progress = silent,
    **cluster: Unpack[OfCluster],
) -> Explained:
    """Every line of an account: its formula, the formula with numbers, its basis and its source.

    With --symbolic one size stays free: the memory as expressions in it, and the largest that fits. Of an optimizer,
    RUN may be its kind, such as adamw: its update as formulas, its states and FLOPs. init is how each tensor starts.

    Raises `InvalidInput`.
    """
    overrides = with_cluster(overrides, **cluster)
    if what in ("optimizer", "init"):
        options = {"--symbolic": symbolic, "--memory": memory, "--stage": stage, "--top": top}
        if wrong := [name for name, value in options.items() if value is not None]:
            raise InvalidInput([Problem(name, options[name], f"is no option of {what}") for name in wrong])
        if what == "optimizer" and isinstance(run, str) and run in OPTIMIZERS:
            return Explained(None, optimizer_page(recipe_of(run, overrides)))
    run = resolve(run, overrides, progress=progress)
    if what == "optimizer":
        return Explained(run, optimizer_page(run.recipe))
    if what == "init":
        return Explained(run, initialization_page(run))
    if stage is not None and stage >= run.layout.pipeline:
        rule = f"must be below layout.pipeline = {run.layout.pipeline}, counted from 0"
        raise InvalidInput([Problem("--stage", stage, rule, run.layout.pipeline - 1)])
    if stage is None and what == "memory" and run.layout.pipeline > 1:
        stage = heaviest(accounts(run, backend=kernels_of(run))).stage
    if top is not None and what != "time":
        raise InvalidInput([Problem("--top", top, f"is of time; of {what} every line is printed")])
    if symbolic is not None:
        if what != "memory":
            raise InvalidInput([Problem("--symbolic", symbolic, f"explains memory, not {what}", "memory")])
        return Explained(run, _over(run, symbolic, memory, stage or 0))
    if memory is not None:
        raise InvalidInput([Problem("--memory", memory, "goes with --symbolic")])
    if what == "time":
        if stage:
            rule = "with time the slowest stage is explained, whichever that is"
            raise InvalidInput([Problem("--stage", stage, rule, 0)])
        return Explained(run, _time(run, top or _LONGEST))
    return Explained(run, _account(run, what, stage or 0))


def _account(run: Run, what: str, stage: int) -> Document:
    """Memory, flops or parameters of a stage."""
    account = with_symbols(run, backend=kernels_of(run), stage=stage)
    parts, held, device = getattr(explained, what)(account), None, device_of(run)
    if what == "memory" and device is not None:
        reserved = tuple((name, account.number(nbytes)) for name, nbytes in account.ledger.reserved)
        held = memory_of_device(run, int(parts[-1].total), device, reserved)
        if not held.tensors_alone:
            parts += (explained.outside_tensors(held),)
    legend = {
        str(size): (value, MEANINGS[str(size)]) for size, value in account.values.items() if str(size) in MEANINGS
    }
    errors = None if device is None else device.errors
    return page(run, kernels_of(run), what, parts, symbols=legend, stage=stage, held=held, errors=errors)


def _time(run: Run, top: int) -> Document:
    """The step by cause, its roofline by kind, and its operations."""
    machine, device = machine_of(run), device_of(run)
    if machine is None:
        rule = "was not measured yet, so it has no times; give --device, or run `trainledger measure machine`"
        raise InvalidInput([Problem("cluster.device", run.cluster.device, rule)])
    tensors = leaves_of(run.model, run.recipe).trained().tensors
    step = layout_time(accounts(run, backend=kernels_of(run)), machine, tensors=tensors)
    if step.seconds is None:
        raise InvalidInput([Problem("cluster.device", run.cluster.device, "; ".join(step.notes))])
    parts, rows = explained.time(step), roofline_table(step.entries, machine)
    return time_document(run, kernels_of(run), parts, rows, top=top, errors=None if device is None else device.errors)


def _over(run: Run, symbol: str, memory: int | None, stage: int) -> Document:
    """The memory over one size, and the largest that fits."""
    device, holds = device_of(run) if memory is None else None, None
    if device is not None:
        memory, holds = device.capacity_nbytes, _holds(run, device)
    over = envelope(run, symbol, backend=kernels_of(run), memory_nbytes=memory, stage=stage, holds=holds)
    about = _whose(run, kernels_of(run), f"Of {run.layout.devices:,} devices, a rank of stage {stage}.")
    return envelope_document(run, about, over, MEANINGS[symbol])


def _holds(run: Run, device: Device) -> Callable[[int], bool]:
    return lambda nbytes: memory_of_device(run, nbytes, device).fits is not False


def page(
    run: Run,
    backend: str,
    what: str,
    parts: Sequence[Part],
    *,
    symbols: Mapping[str, tuple[int, str]] | None = None,
    stage: int = 0,
    held: DeviceMemory | None = None,
    errors: ErrorModel | None = None,
) -> Document:
    """All lines of an account of memory, flops or parameters; ``symbols`` are the numbers and meanings of letters.

    Of flops also those of a forward of one sequence by component of the model, beside its parameters.
    ``held`` is what a device holds at the peak of memory, ``errors`` are those of predictions for its device, of memory
    the ground of its interval.
    """
    symbols = symbols or {}
    whole = "the whole model" if what == "parameters" else f"a rank of stage {stage}"
    letters = tuple((name, value, means) for name, (value, means) in symbols.items())
    legend = Table("symbols", ("symbol", "value", "meaning"), letters, units=("", "integer"))
    forward, totals, by_component = {}, {}, None
    if what == "flops":
        forward = forward_flops(run.model, run.recipe.seq_len, attention=run.recipe.attention)
        totals = {"flops": sum(part.total for part in parts), **forward_totals(run.model, forward, run.recipe.seq_len)}
        of_model = components_table(parameters(run.model).by_component, forward)
        by_component = section(f"Of the model, and of a forward of {run.recipe.seq_len:,} tokens", of_model)
    return Document(
        title=f"{what} of {run.model.name}",
        verdict=_verdict(run, what, parts, held),
        sections=sections(
            *_whose(run, backend, f"Of {run.layout.devices:,} devices, {whole}."),
            by_component,
            _largest(what, parts, _LINES - 12 * (by_component is not None)),
            None if held is None or held.tensors_alone else _in_all(held),
            *details("every line with its formula", legend if letters else None, *account_terms(what, parts)),
            *details(
                "the interval",
                notes(map(sentence, of_memory(run, errors))) if what == "memory" and errors is not None else None,
            ),
        ),
        data=lambda: {
            "account": what,
            "run": run_data(run),
            "symbols": {name: value for name, (value, _) in symbols.items()},
            "parts": _parts_data(what, parts),
            **({"forward_flops": forward, "totals": totals} if forward else {}),
        },
    )


def _verdict(run: Run, what: str, parts: Sequence[Part], held: DeviceMemory | None) -> str:
    """The number that is explained."""
    if what == "memory":
        if held is None or held.usable_nbytes is None:
            return f"{format_nbytes(int(parts[-1].total))} of tensors at the peak."
        nbytes, usable = int(held.nbytes), held.usable_nbytes
        likely = chance_on(run, None if held.tensors_alone else device_of(run), nbytes, usable)
        return f"{format_nbytes(nbytes)} of {format_nbytes(usable)} usable: {fits(held.fits, likely)}."
    if what == "parameters":
        count = parameters(run.model)
        active = "" if count.active == count.total else f", {format_count(count.active)} of them active for a token"
        return f"{format_count(count.total)} parameters{active}."
    return f"{format_flops(sum(part.total for part in parts))} in a step of a rank."


def _in_all(held: DeviceMemory) -> str:
    """What a device holds at the peak, as a plan has it."""
    tensors = held.lines[0].nbytes
    return (
        f"In all: {format_nbytes(held.nbytes)}, {format_nbytes(tensors)} of tensors at the peak and "
        f"{format_nbytes(held.nbytes - tensors)} outside of them."
    )


def _largest(what: str, parts: Sequence[Part], lines_in_all: int = _LINES) -> Table:
    """The total of each part of an account, and its largest lines."""
    most = max(1, lines_in_all // max(1, len(parts)) - 1)
    rows: list[tuple[Cell, ...]] = []
    for part in parts:
        lines = sorted(part.lines, key=lambda line: -abs(float(line.value)))
        rows.append((part.title, Amount(part.total, UNITS[what]), ""))
        rows += [(f"- {line.what}", Amount(line.value, UNITS[what]), line.basis) for line in lines[:most]]
        if len(lines) > most:
            rest = sum(line.value for line in lines[most:])
            rows.append((f"- {counted(len(lines) - most, 'more line')}", Amount(rest, UNITS[what]), ""))
    return Table("largest", (what, "", "basis"), tuple(rows), align="lrl")


def account_terms(what: str, parts: Sequence[Part]) -> tuple[Terms, ...]:
    """The lines of each part of an account of memory, flops or parameters, and their sum."""
    return tuple(_terms(part, UNITS[what]) for part in parts)


def time_document(
    run: Run,
    backend: str,
    parts: Sequence[Part],
    rows: Sequence[RooflineRow],
    *,
    top: int,
    errors: ErrorModel | None = None,
) -> Document:
    """A step by cause, its roofline by kind of operation, and its ``top`` longest operations.

    ``errors`` are those of predictions for its device, the ground of the step's interval.
    """
    shown, others = longest(parts[1:], top)
    ranks = f"The run has {run.layout.devices:,} devices; these are the operations of one rank of the slowest stage."
    return Document(
        title=f"time of {run.model.name}",
        verdict=f"A step{' of full rows' if run.data.lengths else ''} takes {format_seconds(parts[0].total)}.",
        sections=sections(
            *_whose(run, backend, ranks),
            _largest("time", parts[:1]),
            roofline(rows),
            section("", _DENSE if any(row.kind == "attention" for row in rows) else None),
            *details("causes", *(_terms(part, "seconds") for part in parts[:1])),
            *details(
                "the interval",
                notes(map(sentence, of_steps(run, errors, float(parts[0].total)))) if errors is not None else None,
            ),
            *details("the longest operations", *(_terms(part, "seconds") for part in shown), others),
        ),
        data=lambda: {
            "account": "time",
            "run": run_data(run),
            "symbols": {},
            "parts": _parts_data("time", parts),
            "roofline": plain(rows),
        },
    )


_DENSE = (
    "The FLOPs of attention are dense, as in explain flops: a kernel that skips masked pairs (a causal one about "
    "half of them) computes fewer, and its true rate is below that of the table."
)


def _whose(run: Run, backend: str, ranks: str) -> tuple[str, ...]:
    xla = "Operations have PyTorch's names: mm is a dot of XLA, which fuses most others and names the fusions itself."
    names = (xla,) if run.recipe.of_xla else ()
    return (heading(run, backend), *(() if run.layout.alone else (ranks,)), *names)


def longest(parts: Sequence[Part], top: int) -> tuple[tuple[Part, ...], tuple[str, ...]]:
    """The parts of a time with the ``top`` longest of all their lines, their sums whole; a sentence on other lines."""
    lines = sorted((line for part in parts for line in part.lines), key=lambda line: -line.value)
    kept, left = {id(line) for line in lines[:top]}, lines[top:]
    if not left:
        return tuple(parts), ()
    shown = tuple(replace(part, lines=tuple(line for line in part.lines if id(line) in kept)) for part in parts)
    seconds = format_seconds(sum(line.value for line in left))
    return shown, (f"{counted(len(left), 'other')}, {seconds} in all: --top {len(lines)} lists every one.",)


def roofline(rows: Sequence[RooflineRow]) -> Table:
    """What each kind of operation computes for a byte, where its format's ridge is, and what it reaches.

    "waiting" is the device's, for the program to launch what comes next.
    """
    columns = ("operations", "FLOP/byte", "ridge", "bound by", "reached", "time", "share")
    units = ("", "ratio", "rate", "", "", "seconds", "share")
    return Table("roofline", columns, tuple(_roofline_row(row) for row in rows), units=units, align="lrrlrrr")


def _roofline_row(each: RooflineRow) -> tuple[Cell, ...]:
    reached: Cell = Amount(each.bytes_per_second, "nbytes_per_second") if each.nbytes else None
    if each.ridge is not None:
        reached = Amount(each.flops_per_second, "flops_per_second")
    waits = each.kind == "unknown" and each.bound == "overhead"  # a step's separate entry: `forecast.predict.step`
    name = "waiting" if waits else f"{each.kind} {each.dtype}".strip()
    return name, each.intensity, each.ridge, each.bound, reached, each.seconds, each.share


def _terms(part: Part, unit: str) -> Terms:
    terms = tuple(Term(line.what, line.value, line.basis, _formula(line), line.source) for line in part.lines)
    return Terms(part.title, part.total, terms, unit)


def _formula(line: Any) -> str:
    numbers = f" = {line.numbers}" if line.numbers and line.numbers != line.formula else ""
    return f"{line.formula}{numbers}"


def _parts_data(what: str, parts: Sequence[Part]) -> list[dict[str, Any]]:
    """The parts of an account; amounts are named by their unit."""
    key, data = _KEYS[what], plain(parts)
    for part in data:
        part[key] = part.pop("total")
        for line in part["lines"]:
            line[key] = line.pop("value")
    found: list[dict[str, Any]] = data
    return found

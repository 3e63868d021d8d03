"""What fits, for a terminal of 80 columns."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from trainledger.document import Figure
from trainledger.ledger.model.parameters import parameters
from trainledger.plan.fit import QUESTIONS, Fit, Found, Row, divides_batch
from trainledger.plan.memory_check import MemoryUse
from trainledger.predict.device_memory import TENSORS_ALONE
from trainledger.report.heading import of_run
from trainledger.report.memory import COLOUR_OF
from trainledger.report.style import COLOURS, GREY, above_bars, around, arranged, height_of, mark
from trainledger.report.table import sentence, table, wrapped
from trainledger.spec.run import Run
from trainledger.units import GIGA, counted, format_count, format_nbytes

_DETAILED = ("model", "sequence", "micro-batch", "devices")
_MOST_DEVICES = 6


def text(fit: Fit) -> str:
    """All answers: the run itself, the table of recipes, and for the best recipe what limits each of them."""
    return "\n\n".join(each for each in _parts(fit) if each)


def _parts(fit: Fit) -> Iterator[str]:
    yield _head(fit)
    yield _table(fit)
    yield "\n".join(wrapped(f"{row.name}: {' '.join(f'--set {each}' for each in row.settings)}")
                    for row in fit.rows[1:])  # fmt: skip
    for row in _detailed(fit):
        yield _limits(fit.run, row)
    if "model" in fit.rows[0].answers:
        yield wrapped(sentence(f"Models are {fit.family}"))


def _detailed(fit: Fit) -> list[Row]:
    """The run as it is, and with all changes where there are any."""
    return [fit.rows[0], *fit.rows[1:][-1:]]


def about(fit: Fit) -> list[str]:
    """Whose answers these are, and whether it fits as it is: above the text, and on the page of the figures."""
    run, held = fit.run, fit.memory
    spec = run.model
    verdict = "fits" if held.fits else "does NOT fit"
    return [
        f"{spec.name}: {parameters(spec).total:,} parameters in {counted(spec.n_layers, 'block')}"
        f" of width {spec.d_model}",
        *of_run(run),
        f"As it is, {_rank(run, held)} holds {format_nbytes(held.nbytes)} and gets "
        f"{format_nbytes(held.usable_nbytes)}: it {verdict}. {_largest(held)}",
        *([sentence(TENSORS_ALONE)] if held.tensors_alone else []),
    ]


def _head(fit: Fit) -> str:
    lines = about(fit)
    if fit.devices:
        named = ", ".join(fit.devices[:_MOST_DEVICES]) + (" and larger" if len(fit.devices) > _MOST_DEVICES else "")
        lines.append(f"Devices that hold it as it is, the smallest first: {named}.")
    elif fit.devices is not None:
        lines.append("No device of the catalog holds it as it is.")
    return "\n".join(wrapped(each) for each in lines)


def _rank(run: Run, held: MemoryUse) -> str:
    return "the device" if run.layout.alone else held.rank


def _largest(held: MemoryUse) -> str:
    largest, tensors = format_nbytes(held.by_category[held.category]), format_nbytes(held.peak_nbytes)
    return f"The most of the {tensors} in tensors are {held.category} ({largest}), at {held.moment}."


def _table(fit: Fit) -> str:
    asked = list(fit.rows[0].answers)
    columns = ["recipe", *(_HEADS[name] for name in asked)]
    rows = [[row.name, *(_size(row.answers[name]) for name in asked)] for row in fit.rows]
    return table(columns, rows, align="l" + "r" * len(asked))


_HEADS = {
    "model": "largest model", "sequence": "longest sequence", "micro-batch": "micro-batch", "devices": "fewest devices",
    "memory": "memory needed",
}  # fmt: skip
_SIZES: dict[str, Callable[[int], str]] = {
    "model": format_count, "sequence": lambda size: f"{size:,}", "micro-batch": lambda size: f"{size:,}",
    "devices": lambda size: f"{size:,}", "memory": format_nbytes,
}  # fmt: skip
_THINGS: dict[str, Callable[[int], str]] = {
    "model": lambda size: f"{format_count(size)} parameters", "sequence": lambda size: counted(size, "token"),
    "micro-batch": lambda size: counted(size, "sequence"), "devices": lambda size: counted(size, "device"),
    "memory": format_nbytes,
}  # fmt: skip


def _size(found: Found) -> str:
    return "none" if found.size is None else _SIZES[found.question](found.size)


def _limits(run: Run, row: Row) -> str:
    """For each question of a recipe: the answer, the next one and what it would need, and what fills the memory."""
    title = "As it is" if not row.settings else "With all of these changes"
    lines = [_limit(run, found) for name, found in row.answers.items() if name in _DETAILED]
    return "\n".join([title, *(wrapped(each) for each in lines)]) if lines else ""


def _limit(run: Run, found: Found) -> str:
    name = QUESTIONS[found.question]
    said = "none fits" if found.size is None else _shape(found)
    told = f"{name[0].upper()}{name[1:]}: {said}"
    if found.beyond is not None and found.beyond_size is not None:
        held = found.beyond
        over = format_nbytes(held.nbytes - held.usable_nbytes)
        told += f"; {_THINGS[found.question](found.beyond_size)} would need {format_nbytes(held.nbytes)}, "
        largest = format_nbytes(held.by_category[held.category])
        told += (
            f"{over} too much: {held.category} {largest} of {_rank(found.beyond_run or run, held)}, at {held.moment}"
        )
    elif found.size is not None:
        told += "; nothing further is tried" if found.question != "devices" else "; there is nothing fewer"
    if found.question == "micro-batch" and found.size is not None:
        told += f" ({_batches(run, found, found.size)})"
    elif found.note and found.question != "model":
        told += f" ({found.note})"
    return sentence(told)


def _batches(run: Run, found: Found, micro_batch: int) -> str:
    """The step that such micro-batches make, and the largest that keep the step of the run."""
    batch, ranks = run.recipe.global_batch, run.layout.data_ranks
    on_each = f", {batch // ranks:,} on each of {ranks:,} data ranks" if ranks > 1 else ""
    told = f"the step as it is has {counted(batch, 'sequence')}{on_each}; "
    divided = "these" if ranks > 1 else "it"
    told += f"the largest micro-batch that divides {divided} is {divides_batch(run, micro_batch)}"
    if found.run is None or found.run.recipe.global_batch == batch:
        return told
    grown = counted(found.run.recipe.global_batch, "sequence")
    return f"{found.run.grad_accum} in a step, as before, make it {grown}; {told}"


def _shape(found: Found) -> str:
    assert found.size is not None
    told = _THINGS[found.question](found.size)
    if found.question == "model" and found.run is not None:
        spec = found.run.model
        sizes = f"{spec.n_layers} layers, {spec.attention.n_heads} heads, d_ff {spec.feed_forward.d_ff}"
        told += f" (d_model {spec.d_model}, {sizes})"
    return told


def figures(fit: Fit) -> dict[str, Figure]:
    """What each recipe holds beside what the device gives, and the largest that fits of each."""
    held = {row.name: found.memory for row in fit.rows if (found := row.answers.get("memory")) and found.memory}
    held = held or {fit.rows[0].name: fit.memory}
    made = {"memory": _memory_figure(fit, held)}
    for name in _DETAILED:
        sizes = [row.answers[name].size or 0 for row in fit.rows if name in row.answers]
        if any(sizes):
            made[name] = _sizes_figure(name, [row.name for row in fit.rows], sizes)
    return made


def _memory_figure(fit: Fit, held: dict[str, MemoryUse]) -> Figure:
    categories = list(dict.fromkeys(name for each in held.values() for name in each.by_category))
    parts = {name: [each.by_category.get(name, 0) for each in held.values()] for name in categories}
    parts["around the tensors"] = [each.nbytes - each.peak_nbytes for each in held.values()]
    data = [
        {
            "type": "bar", "orientation": "h", "name": name, "y": list(held), "x": [each / GIGA for each in nbytes],
            "marker": {"color": COLOUR_OF.get(name, GREY)},
            "hovertemplate": "%{x:.2f} GB of " + name + "<extra>%{y}</extra>",
        }
        for name, nbytes in parts.items()
        if any(nbytes)
    ]  # fmt: skip
    usable = fit.memory.usable_nbytes / GIGA
    title = f"{fit.run.model.name} on {fit.run.cluster.count:,} x {fit.run.cluster.device}: at the peak"
    layout = arranged(title, "memory of the heaviest device (GB)", height=height_of(len(held)), barmode="stack")
    layout["legend"] |= {"traceorder": "normal"}
    layout["xaxis"] |= {"range": around([0.0, usable, *(each.nbytes / GIGA for each in held.values())])}
    mark(layout, "v", usable, f"{format_nbytes(fit.memory.usable_nbytes)} usable")
    above_bars(layout, held)
    return {"data": data, "layout": layout}


def _sizes_figure(question: str, names: list[str], sizes: list[int]) -> Figure:
    told = [_THINGS[question](size) if size else "none fits" for size in sizes]
    bar = {
        "type": "bar", "orientation": "h", "y": names, "x": sizes, "text": told, "textposition": "auto", "textangle": 0,
        "marker": {"color": COLOURS[0]}, "hovertemplate": "%{text}<extra>%{y}</extra>",
    }  # fmt: skip
    layout = arranged(QUESTIONS[question], _UNITS[question], height=height_of(len(names)))
    above_bars(layout, names)
    return {"data": [bar], "layout": layout}


_UNITS = {"model": "parameters", "sequence": "tokens", "micro-batch": "sequences", "devices": "devices"}

"""The largest model, sequence and micro-batch, fewest devices and least memory that fit; and what limits each."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from time import process_time
from typing import Annotated, Any, Unpack

from trainledger.answers import defaults
from trainledger.answers.fits import LIMIT, advices, nearest_items, nearest_of, trials_of
from trainledger.answers.load import Source, resolve
from trainledger.answers.machine import kernels_of, machine_of
from trainledger.answers.pages.heading import layout_name, model_line, of_run
from trainledger.answers.pages.interval import chance as written
from trainledger.answers.pages.interval import fits
from trainledger.answers.pages.memory import COLOUR_OF
from trainledger.answers.pages.plain_data import plain, run_data
from trainledger.answers.plan import planned
from trainledger.answers.question import Progress, choice, question, share, silent, text
from trainledger.answers.source import OfCluster, also, with_cluster
from trainledger.answers.write_back import To, in_words, unwritten, words_data, words_section
from trainledger.forecast.plan.fit import QUESTIONS, Fit, Found, Row, divides_batch, what_fits
from trainledger.forecast.plan.memory_model import MemoryUse
from trainledger.forecast.predict.device_memory import TENSORS_ALONE
from trainledger.forecast.predict.interval import EVEN, LIKELY
from trainledger.ledger.model.parameters import parameters
from trainledger.report.chart import Bars, Chart, bar_chart, stacked, usable_memory
from trainledger.report.document import Amount, Cell, Document, Section, Table, section, sections
from trainledger.report.table import sentence
from trainledger.spec.problem import InvalidInput
from trainledger.spec.reading import Overrides
from trainledger.spec.run import Run
from trainledger.spec.units import GIGA, counted, format_count, format_nbytes

_DETAILED = ("model", "sequence", "micro-batch", "devices")
_MOST_DEVICES, _DEVICE = 6, "cluster.device"
_COLUMNS = {
    "model": ("largest model", "count"),
    "sequence": ("longest sequence", "integer"),
    "micro-batch": ("micro-batch", "integer"),
    "devices": ("fewest devices", "integer"),
    "memory": ("memory needed", "nbytes"),
}
_THINGS = {"sequence": "token", "micro-batch": "sequence", "devices": "device"}


@question(impossible=unwritten)
def fit(
    run: Source,
    overrides: Overrides = (),
    *,
    of: Annotated[str | Iterable[str] | None, choice("only this question", QUESTIONS, several=True)] = None,
    changes: Annotated[bool, text("the recipe without changes that save memory", flag="--as-is")] = True,
    chance: Annotated[float, share("the least chance to fit of an answer; 0 trusts the count", most=0.99)] = LIKELY,
    write: To = None,
    progress: Progress = silent,
    **cluster: Unpack[OfCluster],
) -> Fit:
    """The largest model, longest sequence, largest micro-batch, fewest devices and least memory that fit.

    RUN is a run file, or a model of the catalog or a Hugging Face config.json: then states are sharded over --count
    devices, one sequence of at most 8,192 tokens at a time, unless --set says otherwise; with --set layout=auto it is
    the run of `trainledger plan`.

    Each question is asked of the run as it is and with changes that need less memory; of a file of another trainer
    these are said in its words, and --write makes a copy with them. Raises `InvalidInput`.
    """
    began, source, sets = process_time(), run, with_cluster(overrides, **cluster)
    asked = resolve(source, sets, purpose=defaults.FIT, progress=progress)
    run = defaults.of_full_rows(asked)
    found = what_fits(
        run,
        machine_of(run),
        backend=kernels_of(run),
        of=tuple(QUESTIONS) if of is None else tuple(of),
        changes=changes,
        chance=chance,
        progress=lambda done, of: progress("questions", done, of),
    )
    saving = [resolve(run, row.settings, search=False) for row in reversed(found.rows) if row.settings]
    if changes and not (found.memory.fits and (found.memory.chance or LIKELY) >= EVEN):
        advice = advices(asked, trials_of(asked, began + LIMIT, progress), goal="memory", enough=LIKELY)
        found = replace(found, nearest=nearest_of(asked, advice, LIKELY, source, sets))
        saving[:0] = [found.nearest.run] if found.nearest and found.nearest.run else []
    devices = [name for name in found.devices or () if _plans(source, also(sets, {_DEVICE: name}), found)]
    return replace(found, devices=found.devices and tuple(devices), words=in_words(run, saving, write))


def _plans(source: Source, sets: Overrides, found: Fit) -> bool:
    """Whether a plan takes the run on another device; where XLA compiles the step there, or another precision is usual,
    whether that fits too."""
    try:
        run = defaults.of_full_rows(resolve(source, sets, purpose=defaults.FIT, search=False))
        recipe, other = run.recipe, found.run.recipe
        if recipe.of_xla is other.of_xla and recipe.precision == other.precision:
            return True
        forecast = planned(run).forecast
    except InvalidInput:
        return False
    return forecast.fits is True and forecast.as_likely_as(found.chance)


def page(fit: Fit) -> Document:
    """Whether the run fits, and the largest of each recipe; what limits each is a detail."""
    detailed = [fit.rows[0], *fit.rows[1:][-1:]]
    rows = fit.rows[1:] if fit.nearest is None else fit.rows[1:][-1:]  # each has the changes of those before it
    changes = tuple(f"{row.name}: {' '.join(f'--set {change}' for change in row.settings)}" for row in rows)
    model, *step, needs = about(fit)[: 2 + len(of_run(fit.run))]
    return Document(
        title=f"What fits of {fit.run.model.name}",
        verdict=needs.partition(". ")[0] + ".",
        sections=sections(
            _table(fit),
            changes,
            nearest_items(fit.nearest.change, fit.nearest.sets) if fit.nearest else None,
            words_section(fit.words),
            section("", about(fit)[2 + len(of_run(fit.run)) :], _devices(fit)),
            section("", model, step, needs.partition(". ")[2], detail="the run"),
            *(replace(_limits(fit.run, row), detail="what limits each") for row in detailed),
            section(
                "",
                sentence(f"Models are {fit.family}") if "model" in fit.rows[0].answers else None,
                detail="the shape of models",
            ),
        ),
        about=tuple(about(fit)),
        data=lambda: _data(fit),
        figures=lambda: figures(fit),
        more=("advise RUN",),
    )


def about(fit: Fit) -> list[str]:
    """Whose answers these are, and whether it fits unchanged."""
    run, use = fit.run, fit.memory
    usable, likely = format_nbytes(use.usable_nbytes), fits(use.fits, use.chance)
    return [
        model_line(run.model),
        *of_run(run),
        f"Without changes{_under(run)}, {_rank(run, use)} needs {format_nbytes(use.nbytes)} of {usable} usable: "
        f"{likely}. {_largest(use)}",
        *([sentence(TENSORS_ALONE)] if use.tensors_alone else []),
    ]


def _under(run: Run) -> str:
    """The layout that was assumed, where `plan` would search for one."""
    assumed = any(name.startswith("layout.") for name in run.origin.assumed)
    return f" under {layout_name(run.layout)}, assumed (plan searches for a layout)" if assumed else ""


def _devices(fit: Fit) -> Iterator[str]:
    if fit.memory.chance is not None and fit.chance:
        yield f"Each size fits with a chance of at least {written(fit.chance)} (--chance)."
        if any(_counted_alone(fit, row) for row in fit.rows):
            yield "None beside bytes that there are: no size has that chance; --chance 0 trusts the count."
    if fit.devices:
        named = ", ".join(fit.devices[:_MOST_DEVICES]) + (" and larger" if len(fit.devices) > _MOST_DEVICES else "")
        yield f"Devices on which it fits without changes, the smallest first: {named}."
    elif fit.devices is not None:
        yield "Without changes it fits on no device of the catalog."


def _counted_alone(fit: Fit, row: Row) -> bool:
    """Whether the least memory is there by the count, and still no sequence fits with the chance."""
    sequence, memory = row.answers.get("sequence"), row.answers.get("memory")
    least = memory.size if memory else None
    return bool(sequence and sequence.size is None and least is not None and least <= (fit.memory.usable_nbytes or 0))


def _rank(run: Run, use: MemoryUse) -> str:
    return "the device" if run.layout.alone else use.rank


def _largest(use: MemoryUse) -> str:
    largest, tensors = format_nbytes(use.by_category[use.category]), format_nbytes(use.peak_nbytes)
    return f"The largest part of the {tensors} of tensors is {use.category} ({largest}), at {use.moment}."


def _table(fit: Fit) -> Table:
    asked = list(fit.rows[0].answers)

    def cell(found: Found) -> Cell:
        return "none" if found.size is None else Amount(found.size, _COLUMNS[found.question][1])

    rows = tuple((row.name, *(cell(row.answers[name]) for name in asked)) for row in fit.rows)
    return Table("answers", ("recipe", *(_COLUMNS[name][0] for name in asked)), rows, align="l" + "r" * len(asked))


def _thing(question: str, size: int) -> str:
    """A size in words: ``8 sequences``."""
    if question == "model":
        return f"{format_count(size)} parameters"
    return counted(size, _THINGS[question]) if question in _THINGS else format_nbytes(size)


def _limits(run: Run, row: Row) -> Section:
    """For each question of a recipe: the answer, the next size and what it would need, and what fills the memory."""
    title = "Without changes" if not row.settings else "With all of these changes"
    lines = (_limit(run, found) for name, found in row.answers.items() if name in _DETAILED)
    return section(title, lines)


def _limit(run: Run, found: Found) -> str:
    name = QUESTIONS[found.question]
    text = f"{name[0].upper()}{name[1:]}: {'none fits' if found.size is None else _shape(found)}"
    if found.beyond is not None and found.beyond_size is not None:
        use = found.beyond
        over = f"{format_nbytes(use.nbytes - use.usable_nbytes)} too much" if not use.fits else fits(True, use.chance)
        largest = f"{use.category} {format_nbytes(use.by_category[use.category])}"
        text += (
            f"; {_thing(found.question, found.beyond_size)} would need {format_nbytes(use.nbytes)}, {over}: "
            f"{largest} of {_rank(found.beyond_run or run, use)}, at {use.moment}"
        )
    elif found.size is not None:
        text += "; nothing larger is tried" if found.question != "devices" else ""
    if found.question == "micro-batch" and found.size is not None:
        text += f" ({_batches(run, found, found.size)})"
    elif found.note and found.question != "model":
        text += f" ({found.note})"
    return sentence(text)


def _batches(run: Run, found: Found, micro_batch: int) -> str:
    """The step that such micro-batches make, and the largest that keep the step of the run."""
    batch, ranks = run.recipe.global_batch, run.layout.data_ranks
    on_each = f", {batch // ranks:,} on each of {ranks:,} data ranks" if ranks > 1 else ""
    text = f"the unchanged step has {counted(batch, 'sequence')}{on_each}; "
    divided = "these" if ranks > 1 else "it"
    text += f"the largest micro-batch that divides {divided} is {divides_batch(run, micro_batch)}"
    if found.run is None or found.run.recipe.global_batch == batch:
        return text
    grown = counted(found.run.recipe.global_batch, "sequence")
    return f"{found.run.grad_accum} in a step, as before, make it {grown}; {text}"


def _shape(found: Found) -> str:
    assert found.size is not None
    text = _thing(found.question, found.size)
    if found.question == "model" and found.run is not None:
        spec = found.run.model
        sizes = f"{spec.n_layers} layers, {spec.attention.n_heads} heads, d_ff {spec.feed_forward.d_ff}"
        text += f" (d_model {spec.d_model}, {sizes})"
    return text


def _data(fit: Fit) -> dict[str, Any]:
    return {
        "run": run_data(fit.run),
        "memory": _memory_data(fit.memory),
        "family": fit.family,
        "devices_that_hold_it": plain(fit.devices),
        "nearest": None if fit.nearest is None else list(fit.nearest.sets),
        **words_data(fit.words),
        "rows": [
            {
                "recipe": row.name,
                "set": list(row.settings),
                "answers": {name: _found_data(fit.run, found) for name, found in row.answers.items()},
            }
            for row in fit.rows
        ],
    }


def _found_data(run: Run, found: Found) -> dict[str, Any]:
    data = {
        "question": QUESTIONS[found.question],
        "size": found.size,
        "note": found.note,
        "memory": _memory_data(found.memory),
        "beyond_size": found.beyond_size,
        "beyond": _memory_data(found.beyond),
    }
    if found.run is not None:
        data["model"] = model_data(found.run)
    if found.question == "micro-batch" and found.size is not None:
        data["divides_the_global_batch"] = divides_batch(run, found.size)
    return data


def model_data(run: Run) -> dict[str, Any]:
    """The shape of a run's model."""
    spec = run.model
    return {
        "parameters": parameters(spec).total,
        "d_model": spec.d_model,
        "n_layers": spec.n_layers,
        "n_heads": spec.attention.n_heads,
        "n_kv_heads": spec.kv_heads,
        "d_ff": spec.feed_forward.d_ff,
    }


def _memory_data(use: MemoryUse | None) -> Any:
    return plain(use, more={MemoryUse: ("fits", "category", "rank")})


def figures(fit: Fit) -> list[Chart]:
    """The memory that each recipe needs and what is usable, and the largest that fits of each."""
    uses = {row.name: found.memory for row in fit.rows if (found := row.answers.get("memory")) and found.memory}
    charts = [_memory_chart(fit, uses or {fit.rows[0].name: fit.memory})]
    for name in _DETAILED:
        sizes = [row.answers[name].size or 0 for row in fit.rows if name in row.answers]
        if any(sizes):
            charts.append(_sizes_chart(name, [row.name for row in fit.rows], sizes))
    return charts


def _memory_chart(fit: Fit, uses: dict[str, MemoryUse]) -> Chart:
    categories = dict.fromkeys(name for use in uses.values() for name in use.by_category)
    parts = {name: [use.by_category.get(name, 0) / GIGA for use in uses.values()] for name in categories}
    parts["outside the tensors"] = [(use.nbytes - use.peak_nbytes) / GIGA for use in uses.values()]
    parts = {name: sizes for name, sizes in parts.items() if any(sizes)}
    names = list(uses)
    bars = stacked(parts, COLOUR_OF, lambda name, row: f"{names[row]}: {parts[name][row]:.2f} GB of {name}")
    title = f"{fit.run.model.name} on {fit.run.cluster.count:,} x {fit.run.cluster.device}: at the peak"
    line = usable_memory(fit.memory.usable_nbytes)
    return bar_chart(title, "memory of the peak rank (GB)", names, [*bars, *line])


def _sizes_chart(question: str, names: list[str], sizes: list[int]) -> Chart:
    texts = [_thing(question, size) if size else "none fits" for size in sizes]
    said = [f"{name}: {text}" for name, text in zip(names, texts, strict=True)]
    unit = "parameters" if question == "model" else f"{_THINGS[question]}s"
    bars = Bars(range(len(sizes)), [0] * len(sizes), sizes, said=said, texts=texts)
    return bar_chart(QUESTIONS[question], unit, names, [bars])

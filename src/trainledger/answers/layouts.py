"""Which layout is quickest: a search, the Pareto front, and why other layouts are left out."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, Unpack

from trainledger import catalog
from trainledger.answers import defaults
from trainledger.answers.layout import refuse_not_searched, spread, why_no_layout
from trainledger.answers.load import Source, resolve
from trainledger.answers.machine import device_of
from trainledger.answers.pages.heading import layout_name
from trainledger.answers.pages.interval import chance as written
from trainledger.answers.pages.plain_data import plain, run_data
from trainledger.answers.question import Progress, count, question, seconds, share, silent, text
from trainledger.answers.source import OfCluster, also, with_cluster
from trainledger.answers.write_back import To, in_words, unwritten, words_data, words_section
from trainledger.forecast.plan.layouts.grid import FIELDS, KNOWN, fixed_by, read_fixed
from trainledger.forecast.plan.layouts.result import AS_QUICK, Gap, Layouts, Rejected, ScoredLayout
from trainledger.forecast.predict.device_memory import TENSORS_ALONE
from trainledger.forecast.predict.interval import chance_on
from trainledger.report.chart import COLOURS, Axis, Chart, Line, Mark, usable_memory
from trainledger.report.document import Cell, Code, Document, Item, Items, Section, Table, notes, section, sections
from trainledger.report.table import commands, pasted, sentence
from trainledger.spec import runfile
from trainledger.spec.device import SHARE
from trainledger.spec.layout import Layout, overlaps
from trainledger.spec.plain import to_plain
from trainledger.spec.problem import InvalidInput, Problem, nearest_text
from trainledger.spec.reading import Overrides, value_of
from trainledger.spec.run_text import as_override, assumed_batch
from trainledger.spec.units import GIGA, counted, format_count, format_percent, format_seconds

_SHOWN = 12  # reasons that are listed
_COLUMNS = ("step", "MFU", "memory", "fits", "TP", "CP", "PP", "EP", "DP", "Z", "B", "recompute")
_UNITS = ("seconds", "share", "nbytes")
_LEGEND = (
    "TP, CP, EP: tensor, context and expert ranks (sp: sequence parallelism). PP: pipeline stages, V chunks each, and "
    "the schedule. DP: replicate x shard. Z: the ZeRO stage; 3k keeps parameters gathered from forward to backward. "
    "B: the micro-batch. fits: the chance to fit. recompute: activation checkpointing (part: selective)."
)


@question(impossible=lambda found: found.problem or unwritten(found))
def layouts(
    run: Source,
    overrides: Overrides = (),
    *,
    devices: int | str | None = None,
    fixed: Annotated[
        Mapping[str, Any] | Iterable[str] | None,
        text("only layouts with this, such as tensor=8 or micro_batch=1; may be repeated", several=True, flag="--fix"),
    ] = None,
    keep: Annotated[int, count("how many layouts to rank", most=1000)] = 10,
    limit_seconds: Annotated[
        float, seconds("the most time for exact accounts of the best layouts", flag="--limit", metavar="TIME")
    ] = 30.0,
    chance: Annotated[
        float | None, share("the least chance to fit of a layout (80 %, or 50 % where none has that)", most=0.99)
    ] = None,
    write: To = None,
    progress: Progress = silent,
    **cluster: Unpack[OfCluster],
) -> Layouts:
    """The fastest ways to spread a run over devices: every layout has a bound, the best are accounted for.

    RUN is a run file, or a model of the catalog or a Hugging Face config.json. The search replaces its own layout,
    micro-batch and activation checkpointing, unless --fix or --set gives them a value. A model without a batch gets
    one of up to 4 million tokens (16 of large budgets), in sequences of at most 8,192. Exit code 130 where the
    search was interrupted: it ranks what was accounted for until then. Exit code 2 where no layout fits. Of a file
    of another trainer the best layout that it has words for is said in these, and --write makes a copy with them.

    ``devices`` and ``device`` are short for overrides; ``fixed`` may be a mapping (``{"tensor": 8}``). Raises
    `InvalidInput`.
    """
    sets = with_cluster(overrides, **cluster)
    written = runfile.written({}, sets)
    more = also(sets, {"cluster.count": devices, "layout.auto": True})
    run = defaults.of_full_rows(resolve(run, more, purpose=defaults.SEARCH, search=False))
    refuse_not_searched(run, written)
    said = {path.split(".")[1] for path in written}
    axes = {name: value for name, value in fixed_by(run, written).items() if name in said} | _fixed(fixed or {})
    found = spread(run, fixed=axes, keep=keep, limit_seconds=limit_seconds, chance=chance, progress=progress)
    if found.best is not None or found.interrupted:
        best = [] if found.simplest is None else [found.simplest.run]
        return replace(found, words=in_words(run, [*best, *(layout.run for layout in found.ranked)], write))
    return replace(found, problem=why_no_layout(found, axes, progress=progress))


def _fixed(given: Mapping[str, Any] | Iterable[str]) -> dict[str, Any]:
    """The values that are fixed, from a mapping or from NAME=VALUE; raises `InvalidInput`."""
    problems: list[Problem] = []
    if isinstance(given, Mapping):
        found = read_fixed(given, problems)
    else:
        values: dict[str, Any] = {}
        for word in given:
            name, equals, value = word.partition("=")
            name = name.strip().rpartition(".")[2]
            if equals and name in FIELDS:
                values[name] = value_of(KNOWN[name], value.strip())
            else:
                rule = f"is written NAME=VALUE, with a name of {', '.join(FIELDS)}"
                problems.append(Problem("--fix", word, rule, nearest_text(name, FIELDS)))
        found = read_fixed(values, problems, "--fix ")
    if problems:
        raise InvalidInput(problems)
    return found


def page(found: Layouts) -> Document:
    """The best layout and the ranked ones; the front, the reasons of others and the search itself are details."""
    first, *others = _ranked(found)
    return Document(
        title=f"Layouts of {found.run.model.name}",
        verdict=verdict(found),
        sections=sections(
            about(found)[0],
            first,
            *others,
            section("", _rejected(found) if found.rejected else None, detail="" if not found.ranked else "the others"),
            section("", notes(_how(found)), detail="the search"),
        ),
        about=tuple(about(found)),
        data=lambda: _data(found),
        figures=lambda: figures(found),
        more=("plan RUN with the --set lines",),
    )


def verdict(found: Layouts) -> str:
    """The quickest layout and the simplest that is about as quick, or why there is none."""
    if found.best is None:
        return _none(found)
    best, simplest = found.best, found.simplest or found.best
    cut = "Interrupted: what was accounted for so far is ranked. " if found.interrupted else ""
    said = f"{cut}Quickest: {_named(best, simplest)}, {format_seconds(best.seconds)} a step"
    if simplest == best:
        return said + "."
    return f"{said}. About as quick and simpler: {_named(simplest, best)}, {format_seconds(simplest.seconds)}."


def _named(one: ScoredLayout, other: ScoredLayout) -> str:
    """A layout as people write it, with what tells it from another of that name."""
    name, other_name = (layout_name(layout.run.layout) for layout in (one, other))
    own = [
        setting.partition(".")[2] for setting in one.settings if name == other_name and setting not in other.settings
    ]
    return f"{name} ({', '.join(own)})" if own else name


def _ranked(found: Layouts) -> Iterator[Section]:
    if found.best is None:
        yield section("", about(found)[1])
        return
    bounds = " by their bounds" if found.basis == "bound" else ""
    remarks = (_LEGEND, *_of_experts(found), *_of_a_sheet(found), *_told_apart(found))
    ranked = _table("ranked", found.ranked, found.usable_nbytes)
    yield section(f"The quickest that fit{bounds}", ranked, "MFU counts attention dense.")
    simplest = found.simplest or found.best
    named = "the best" if simplest == found.best else "the simplest within 3 %"
    sets = (*simplest.settings, *assumed_batch(found.run, simplest.run))
    pasted_sets = Items((Item(f"To plan {named}, which layout=auto takes:", commands(sets)),), numbered=False)
    yield section("", pasted_sets)
    yield words_section(found.words) or section("")
    if simplest != found.best:
        title = f"Within {format_percent(AS_QUICK - 1)} of the quickest, and simpler"
        yield section(title, _table("simplest", [simplest], found.usable_nbytes), detail="the simplest")
    if len(found.pareto) > 1:
        title = "Less memory for a longer step (Pareto front)"
        yield section(title, _table("pareto", found.pareto, found.usable_nbytes), detail="the Pareto front")
    yield section("Columns", remarks, detail="what the columns mean")
    yield section("To paste into a run file", Code(pasted(simplest.toml)), detail="the layout as TOML")


def about(found: Layouts) -> list[str]:
    """Whose layouts these are, and of how many."""
    recipe = found.run.recipe
    batch = f"{counted(recipe.global_batch, 'sequence')} of {counted(recipe.seq_len, 'token')} a step"
    return [
        f"{found.run.model.name} on {found.devices:,} x {found.device}: {batch}, {recipe.precision.kind}, "
        f"{recipe.optimizer.kind}",
        f"{found.searched:,} layouts; {found.allowed:,} obey the rules, {found.fitting:,} of these may fit",
    ]


def _none(found: Layouts) -> str:
    """Why there is no layout, and what helps where one thing prevents most."""
    if found.fitting and not found.certain:
        return f"No layout that fits was found before the time limit; {counted(found.accounted, 'account')} made."
    if found.allowed:
        return f"None of them fits {found.devices:,} x {found.device}."
    helps = ""
    if found.run.model.n_mtp_layers:
        helps = " Without its multi-token prediction the model can be spread: --set model.n_mtp_layers=0."
    below = "; the reasons are below" if found.rejected else ""
    return f"No layout over {found.devices:,} x {found.device} is allowed{below}.{helps}"


def _table(name: str, some: Sequence[ScoredLayout], usable: int | None) -> Table:
    return Table(name, _COLUMNS, tuple(_row(layout, usable) for layout in some), units=_UNITS, align="rrrrllllllrl")


def _row(each: ScoredLayout, usable: int | None) -> tuple[Cell, ...]:
    layout, recipe = each.run.layout, each.run.recipe
    likely = chance_on(each.run, device_of(each.run), each.device_nbytes, usable)
    fits = "" if likely is None else written(likely)
    pipeline = str(layout.pipeline)
    if layout.pipeline > 1:
        schedule = {"interleaved": f"x{layout.virtual_stages}V", "zero-bubble": " zb"}
        pipeline += schedule.get(layout.schedule, f" {layout.schedule}")
    zero = "-"
    if layout.shard_ranks > 1:
        zero = f"{layout.zero}k" if layout.zero == 3 and not layout.reshards else str(layout.zero)
    context = str(layout.context) + (" a2a" if layout.context > 1 and layout.context_kind != "ring" else "")
    return (
        each.seconds, each.mfu, each.device_nbytes, fits, f"{layout.tensor}{' sp' if layout.sequence_parallel else ''}",
        context, pipeline, _experts(layout), f"{layout.replicate}x{layout.shard}", zero, str(recipe.micro_batch),
        {"selective": "part"}.get(recipe.activation_checkpointing.kind, recipe.activation_checkpointing.kind),
    )  # fmt: skip


def _experts(layout: Layout) -> str:
    """Expert ranks; n: tokens are sent once to each node, b: overlapped with another micro-batch."""
    how = "n" * layout.sends_to_nodes + "b" * overlaps(layout, "experts")
    return f"{layout.expert} {how}".rstrip()


def _of_experts(found: Layouts) -> Iterator[str]:
    """What n and b mean, as ``--set`` takes it, where a layout has them."""
    every = [layout.run.layout for layout in (*found.ranked, *found.pareto)]
    overlapped = next((layout for layout in every if overlaps(layout, "experts")), None)
    said = []
    if any(layout.sends_to_nodes for layout in every):
        said.append("n: --set layout.expert_send=nodes, tokens sent once to each node (as DeepEP does)")
    if overlapped is not None:
        override = as_override("layout.overlap", overlapped.overlap)
        said.append(f"b: --set '{override}', overlapped with another micro-batch (DualPipe, Megatron Core)")
    yield from said
    if said:
        yield (
            "Unless the run says otherwise the search selects these, the quickest in nearly every layout; "
            "--fix expert_send=copies and --fix overlap=gradients search the others."
        )


def _of_a_sheet(found: Layouts) -> Iterator[str]:
    """What qualifies the numbers of a device of which only the data sheet is known."""
    if found.basis == "bound":
        yield (
            f"Steps and MFU are bounds from the peaks of {found.device}'s data sheet: no run is faster, most are "
            "slower, and not all layouts by as much."
        )
    if found.best is not None and found.best.device_nbytes == found.best.peak_nbytes:
        yield sentence(TENSORS_ALONE)


def _told_apart(found: Layouts) -> Iterator[str]:
    """How far steps of two layouts must differ to be distinguished."""
    if found.basis != "bound" and found.device in catalog.device_names():
        off = catalog.errors(found.device).one_device.ratio - 1
        yield (
            f"Steps less than {format_percent(off)} apart are within the error of comparing two published runs on one "
            f"device ({SHARE:.0%} of pairs)."
        ).replace("80%", "80 %")


def _rejected(found: Layouts) -> Table:
    reasons = _alike(found.rejected)
    shown, rest = reasons[:_SHOWN], reasons[_SHOWN:]
    rows: list[tuple[Cell, ...]] = [(count, reason) for reason, count in shown]
    if rest:
        rows.append((sum(count for _, count in rest), f"{counted(len(rest), 'other reason')} (--json has all)"))
    return Table("rejected", ("layouts", "why not"), tuple(rows), units=("integer",), align="rl")


def _alike(rejected: Sequence[Rejected]) -> list[tuple[str, int]]:
    """Reasons and how many layouts each keeps out, most first; those that differ in one size are one, with its range.

    >>> _alike([Rejected("of the 8 ranks", 3), Rejected("does not fit", 4), Rejected("of the 32 ranks", 2)])
    [('of the 8 to 32 ranks', 5), ('does not fit', 4)]
    """
    kinds: dict[tuple[str, ...], list[Rejected]] = {}
    for each in rejected:
        before, size, after = _size_in(each.reason)
        kinds.setdefault((before, after) if size else (each.reason,), []).append(each)
    found = []
    for kind, same in kinds.items():
        reason = same[0].reason
        if len(same) > 1 and len(kind) == 2:
            sizes = sorted(int(_size_in(each.reason)[1]) for each in same)
            reason = f"{kind[0]}{sizes[0]} to {sizes[-1]}{kind[1]}"
        found.append((reason, sum(each.count for each in same)))
    return sorted(found, key=lambda each: -each[1])


def _size_in(reason: str) -> tuple[str, str, str]:
    """A reason in three parts: before the number of "the 8 ranks" or "the 8 heads", the number, and the rest."""
    match = re.search(r"(?<=\bthe )\d+(?= )", reason)
    return (reason[: match.start()], match[0], reason[match.end() :]) if match else (reason, "", "")


def _how(found: Layouts) -> Iterator[str]:
    rate = format_count(round(found.layouts_per_second))
    yield (
        f"CPU time: {format_seconds(found.preparing_seconds)} to build the grid and the parts that layouts are made "
        f"of; {format_seconds(found.bounding_seconds)} to bound the memory and time of {found.allowed:,} layouts "
        f"({rate} per second); {format_seconds(found.accounting_seconds)} for "
        f"{counted(found.accounted, 'full account')}, the best first."
    )
    for what, gap in (("time", found.seconds_gap), ("memory", found.nbytes_gap)):
        if gap is not None:
            yield f"Their bounds of {what} were {_apart(gap)} below the account."
    if found.best is not None and found.certain:
        yield "No other layout can be among the ranked, if bounds hold as they did for these."
    yield from (sentence(note) for note in found.notes if not note.startswith("interrupted"))  # the verdict says it


def _apart(gap: Gap) -> str:
    least, middle, most = (format_percent(each) for each in (gap.least, gap.median, gap.most))
    return f"{least} to {most} (median {middle})"


def _data(found: Layouts) -> dict[str, Any]:
    data: dict[str, Any] = plain(found, more={Layouts: ("layouts_per_second",)}, less={Layouts: _OF_LAYOUTS})
    data["device_title"] = data.pop("device")
    del data["devices"]
    return {
        **data,
        "run": run_data(found.run),
        "ranked": [_layout_data(layout) for layout in found.ranked],
        "simplest": None if found.simplest is None else _layout_data(found.simplest),
        "pareto": [_layout_data(layout) for layout in found.pareto],
        **words_data(found.words),
    }


_OF_LAYOUTS = ("run", "ranked", "simplest", "pareto", "problem", "words")


def _layout_data(each: ScoredLayout) -> dict[str, Any]:
    recipe = each.run.recipe
    return {
        "layout": to_plain(each.run.layout),
        "micro_batch": recipe.micro_batch,
        "activation_checkpointing": recipe.activation_checkpointing.kind,
        "set": list(each.settings),
        "step_seconds": each.seconds,
        **plain(each, less={ScoredLayout: ("run", "seconds")}),
    }


def figures(found: Layouts) -> list[Chart]:
    """Step time against memory: the ranked layouts, and the Pareto front, numbered, with what its layouts are."""
    if not found.ranked:
        return []
    numbers = [f"{number}" for number in range(1, len(found.pareto) + 1)]
    marks: list[Mark] = [
        _points("quickest", found.ranked, COLOURS[4]),
        _points("Pareto front", found.pareto, COLOURS[0], 2, numbers),
        *usable_memory(found.usable_nbytes),
    ]
    title = f"Step time against memory: {found.run.model.name} on {found.devices:,} x {found.device}"
    x, key = Axis("memory of the peak rank (GB)"), tuple(layout.title for layout in found.pareto)
    return [Chart(title, tuple(marks), x, Axis("step (seconds)"), key)]


def _points(name: str, some: Sequence[ScoredLayout], colour: str, width: int = 0, texts: Sequence[str] = ()) -> Line:
    x, y = [layout.device_nbytes / GIGA for layout in some], [layout.seconds for layout in some]
    said = [f"{name}: {layout.title}\n{layout.seconds:.4g} s, {layout.device_nbytes / GIGA:.4g} GB" for layout in some]
    return Line(x, y, name, colour, width, symbol="circle", said=said, texts=texts)

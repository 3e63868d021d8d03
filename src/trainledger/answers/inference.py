"""A served model: the memory and the time of one forward, and the costs and gains of a larger batch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import fields, replace
from typing import Annotated, Any, Unpack

from trainledger.answers import defaults
from trainledger.answers.load import Source, resolve
from trainledger.answers.machine import kernels_of, machine_of
from trainledger.answers.pages.device_memory import memory_data, verdict
from trainledger.answers.pages.plain_data import plain, run_data
from trainledger.answers.question import Progress, choice, count, length, question, silent, text
from trainledger.answers.source import OfCluster, also, with_cluster
from trainledger.forecast.plan.serving import MOST_BATCH, BatchRow, Inference, served
from trainledger.forecast.predict.device_memory import TENSORS_ALONE, of_a_device
from trainledger.report.chart import COLOURS, Axis, Chart, Line, stacked, usable_memory
from trainledger.report.document import Amount, Cell, Document, Section, Table, details, notes, section, sections
from trainledger.report.table import sentence
from trainledger.spec.layout import Layout
from trainledger.spec.problem import InvalidInput, Problem
from trainledger.spec.reading import Overrides
from trainledger.spec.serving import CACHE_FORMATS, PHASES, WEIGHT_FORMATS, WHOLE, Serving
from trainledger.spec.units import GIGA, KIB, KILO, counted, format_gigabytes, format_seconds

_ALWAYS = 3  # columns of the table of batches that are never empty
_BOUND, _EXPECTED = COLOURS[0], COLOURS[1]


_MOST_RANKS = 16  # tensor ranks that are proposed


def why_not_served(served: Inference) -> Problem | None:
    """Why a batch is not served, with what would help; None where it is."""
    if served.fits is not False:
        return None
    near = served.largest_batch or _ranks_that_hold(served)
    rule = "does not fit in the memory of the device" + ("" if served.largest_batch else ", nor does any other batch")
    return Problem("--batch", served.serving.batch, rule, near)


def _ranks_that_hold(served: Inference) -> str | None:
    """The fewest tensor ranks that hold the model and the batch, as ``layout=auto`` finds them; None without any."""
    serving = {field.name: getattr(served.serving, field.name) for field in fields(served.serving)}
    with suppress(InvalidInput):
        run = replace(served.run, layout=Layout(auto=True), origin=replace(served.run.origin, explicit=frozenset()))
        found = inference(run, {"cluster.count": _MOST_RANKS}, **serving)
        if found.fits:
            return f"--count {found.run.layout.tensor} --set layout.tensor={found.run.layout.tensor}"
    return None


@question(impossible=why_not_served, trains=False)
def inference(
    run: Source,
    overrides: Overrides = (),
    *,
    phase: Annotated[str, choice("prefill of a prompt, or decode of one more token", PHASES)] = "decode",
    batch: Annotated[int, count("sequences at once", most=10**9)] = 1,
    context: Annotated[int | None, length("tokens of each sequence", default_text="recipe.seq_len")] = None,
    weights: Annotated[
        str | None,
        text("format of the weights: bf16, int8, int4, fp8, nf4, mxfp4 and others", default_text="that of --compute"),
    ] = None,
    cache: Annotated[
        str | None, text("format of keys and values: bf16, fp8, int8, int4", default_text="that of --compute")
    ] = None,
    compute: Annotated[
        str | None, text("format of matmuls and of what is not quantized: bf16, fp16, fp32", default_text="bf16")
    ] = None,
    quantized: Annotated[str, text("matrices that have the format of the weights: linear or experts")] = "linear",
    progress: Progress = silent,
    **cluster: Unpack[OfCluster],
) -> Inference:
    """One forward of a trained model: prefill of a prompt, or decode of one more token. Modules that predict further
    tokens are no part of it.

    ``compute`` is bf16 (fp16 where the device has no bf16), and ``weights`` and ``cache`` (`spec.serving`) are as
    ``compute``. With ``layout.auto`` it takes the fewest tensor ranks that hold them, unless ``layout.tensor`` is
    given. Raises `InvalidInput`.
    """
    # A search would be one of layouts to train with.
    # What predicts further tokens is not served.
    overrides = with_cluster(overrides, **cluster)
    run = resolve(run, also(overrides, {"model.n_mtp_layers": 0}), purpose=defaults.SERVE, search=False)
    if run.layout.auto and "layout.tensor" in run.origin.explicit:
        run = replace(run, layout=replace(run.layout, auto=False))
    machine = machine_of(run)
    if compute is None:
        peaks = {} if machine is None else machine.peak_flops_per_second
        compute = next((each for each in ("bf16", "fp16", "fp32") if each in peaks), "bf16")
    serving = Serving(
        phase=phase,
        batch=batch,
        context=context or run.recipe.seq_len,
        weights=compute if weights is None else weights,
        cache=compute if cache is None else cache,
        compute=compute,
        quantized=quantized,
    )
    if problems := list(serving.problems()):
        raise InvalidInput(problems)
    return served(run, serving, machine, backend=kernels_of(run))


def page(found: Inference) -> Document:
    """The whole account of one forward."""
    return Document(
        title=f"{found.run.model.name}, served",
        verdict=_verdict(found),
        sections=sections(
            head(found),
            _memory(found),
            _forward(found),
            _time(found) if found.time is not None else None,
            *details("larger batches", _batches(found) if found.batches else None),
            *details("notes", notes(map(sentence, found.notes))),
        ),
        about=tuple(about(found)),
        data=lambda: _data(found),
        figures=lambda: figures(found),
    )


def _verdict(found: Inference) -> str:
    """Whether the model and its batch fit, and the expected time of one forward."""
    says = {True: "Fits", False: "Does NOT fit", None: ""}[found.fits]
    time, rate = found.time, found.expected_tokens_per_second
    expected = ""
    what = "a forward" if found.serving.phase == "prefill" else "a token of each sequence"
    if time is not None and time.expected_seconds is not None and rate is not None:
        expected = f"{what} is expected to take {format_seconds(time.expected_seconds)}, {_rate(rate)} tokens/s"
    elif time is not None and found.fits is not False:
        least = "at least" if time.basis == "bound" else "about"
        expected = f"{what} takes {least} {format_seconds(time.bound_seconds)}"
    return sentence("; ".join(filter(None, (says, expected)))) if says or expected else ""


def head(found: Inference) -> Iterator[str]:
    """What is served and in which formats, a line each."""
    serving, tensor = found.serving, found.run.layout.tensor
    sequences = counted(serving.batch, "sequence")
    if serving.phase == "prefill":
        yield f"{found.run.model.name}, prefill: the {serving.context:,} tokens of each of {sequences}"
    else:
        yield f"{found.run.model.name}, decode: one more token of {sequences}, the last of {serving.context:,}"
    weights, cache = WEIGHT_FORMATS[serving.weights], CACHE_FORMATS[serving.cache]
    which = " (experts only)" if serving.quantized == "experts" and serving.weights not in WHOLE else ""
    yield f"Weights in {serving.weights}{which}: {weights.title}; cache in {serving.cache}: {cache.title}"
    if tensor > 1:
        yield f"On {tensor} tensor ranks; what follows is one of them"


def _memory(found: Inference) -> Section:
    weights, serving = found.weights, found.serving
    amounts: list[tuple[str, int | None]] = []
    if weights.codes:
        amounts += [(f"weights in {serving.weights}", weights.codes), ("their scales", weights.scales)]
        amounts.append(("weights that are not quantized", weights.whole))
    peak = found.ledger.peak().nbytes
    amounts += [("all weights", weights.nbytes), ("KV cache", found.cache_nbytes)]
    amounts.append(("activations and buffers", peak - weights.nbytes - found.cache_nbytes))
    lines, device = [_token_line(found)], found.memory
    if device is not None:
        amounts.append(("outside the tensors", None if device.tensors_alone else device.nbytes - peak))
        amounts.append(("in all", device.nbytes))
        lines += [sentence(TENSORS_ALONE)] if device.tensors_alone else []
        lines += [verdict(device.nbytes, device)] if device.usable_nbytes is not None else []
    rows: list[tuple[Cell, ...]] = [
        (name, "not counted", None) if nbytes is None else (name, Amount(nbytes, "nbytes"), nbytes)
        for name, nbytes in amounts
    ]
    table = Table("memory", ("memory", "", "bytes"), tuple(rows), units=("", "", "integer"), align="lrr")
    return section("", table, lines)


def _token_line(found: Inference) -> str:
    one = f"One token takes {found.token_nbytes:,} bytes ({found.token_nbytes / KIB:.4g} KiB) of the KV cache"
    if found.run.layout.tensor > 1:
        one += f" of a rank, {found.whole_token_nbytes / KIB:.4g} KiB of the whole model's"
    if found.run.model.attention.window is not None:
        one += f"; layers with a window keep at most {found.run.model.attention.window:,} tokens"
    return one + "."


def _forward(found: Inference) -> Table:
    everything = sum(found.moved_nbytes.values())
    rows: list[tuple[Cell, ...]] = [
        (name, Amount(nbytes, "nbytes"), nbytes / everything) for name, nbytes in found.moved_nbytes.items()
    ]
    ridge = "" if found.ridge is None else f"ridge {found.ridge:.4g}"
    rows += [
        ("moved in all", Amount(everything, "nbytes"), None),
        ("FLOPs of matmuls", Amount(found.ledger.matmul_flops, "flops"), None),
        ("FLOPs per byte", f"{found.intensity:.4g}", ridge),
    ]
    return Table("one forward", ("one forward", "", ""), tuple(rows), units=("", "", "share"), align="lrr")


def _time(found: Inference) -> Iterator[str]:
    time, serving = found.time, found.serving
    assert time is not None
    rate = found.bound_tokens_per_second
    assert rate is not None
    sheet = time.basis == "bound"
    least, most = ("at least", "at most") if sheet else ("about", "about")
    yield (
        f"On {found.device} {least} {format_seconds(time.bound_seconds)}, {time.limit}-bound: "
        f"{most} {_rate(rate)} tokens/s"
        + (
            f", {_rate(rate / serving.batch)} of each sequence"
            if serving.batch > 1 and serving.phase == "decode"
            else ""
        )
        + "."
    )
    rates = "the data sheet" if sheet else "the measured rates"
    link_seconds = format_seconds(time.bound_seconds_by_limit["links"])
    links = f", and {_between(found)}: {link_seconds} of it" if found.collectives else ""
    yield f"This bound has matmuls and attention at {rates} and all other operations fused into them{links}."
    expected, between = found.expected_tokens_per_second, time.expected_link_seconds
    if time.expected_seconds is not None and expected is not None:
        yield (
            f"Expected with one kernel for each operation, at calibrated rates: "
            f"{format_seconds(time.expected_seconds)}, {_rate(expected)} tokens/s"
            + (f"; {_between(found)} take {format_seconds(between)} of it" if between else "")
            + "."
        )


def _between(found: Inference) -> str:
    """The collectives of tensor ranks in one forward, such as ``161 all-reduces between tensor ranks``."""
    named = [counted(times, name.replace("_", "-")) for name, times in found.collectives.items()]
    return f"{' and '.join(named)} between tensor ranks"


def _rate(tokens_per_second: float) -> str:
    return f"{tokens_per_second:,.4g}" if tokens_per_second < 9999.5 else f"{tokens_per_second:,.0f}"


def _batches(found: Inference) -> Section:
    rows = [_row(batch) for batch in found.batches]
    measured = any(batch.time is not None and batch.time.basis != "bound" for batch in found.batches)
    columns = ("batch", "KV cache", "memory", "about" if measured else "at least", "tokens/s", "bound", "")
    filled = [at for at in range(len(columns)) if at < _ALWAYS or any(row[at] not in ("", None) for row in rows)]
    table = Table(
        "batches",
        tuple(columns[at] for at in filled),
        tuple(tuple(row[at] for at in filled) for row in rows),
        units=tuple(("integer", "nbytes", "", "seconds", "", "", "")[at] for at in filled),
        align="".join("rrrrrll"[at] for at in filled),
    )
    return section("", table, None if found.largest_batch is None else largest(found.largest_batch))


def largest(batch: int) -> str:
    """A sentence for the largest batch that fits, 0 where none does; more than `MOST_BATCH` are not tried.

    >>> largest(61), largest(0)
    ('The largest batch that fits is 61.', 'Not even one sequence fits.')
    """
    if batch == MOST_BATCH:
        return f"A batch of {batch:,} fits; larger ones are not tried."
    return f"The largest batch that fits is {batch:,}." if batch else "Not even one sequence fits."


def _row(each: BatchRow) -> tuple[Cell, ...]:
    fits = {True: "", False: "too large", None: ""}[each.fits]
    memory = format_gigabytes(each.device_nbytes)
    if each.time is None or each.bound_tokens_per_second is None:
        return each.batch, each.cache_nbytes, memory, None, "", "", fits
    rate = _rate(each.bound_tokens_per_second)
    return each.batch, each.cache_nbytes, memory, each.time.bound_seconds, rate, each.time.limit, fits


def _data(found: Inference) -> dict[str, Any]:
    weights = {f"{name}_nbytes": nbytes for name, nbytes in vars(found.weights).items()}
    return {
        "run": run_data(found.run), "serving": plain(found.serving), "device_title": found.device,
        "parameters": found.ledger.parameters, "weights": {**weights, "nbytes": found.weights.nbytes},
        "cache_nbytes": found.cache_nbytes, "cache_token_nbytes": found.token_nbytes,
        "cache_token_nbytes_of_all_ranks": found.whole_token_nbytes, "peak_nbytes": found.ledger.peak().nbytes,
        "device_memory": memory_data(found.memory), "fits": found.fits, "moved_nbytes": found.moved_nbytes,
        "matmul_flops": found.ledger.matmul_flops, "intensity": found.intensity, "ridge": found.ridge,
        "time": plain(found.time), "bound_tokens_per_second": found.bound_tokens_per_second,
        "expected_tokens_per_second": found.expected_tokens_per_second, "collectives": found.collectives,
        "batches": plain(found.batches), "largest_batch": found.largest_batch, "notes": list(found.notes),
    }  # fmt: skip


def figures(found: Inference) -> list[Chart]:
    """The time of a forward and the tokens per second of each batch, where times are known, and its memory.

    Batches that do not fit have no times here; the first of them is drawn with the memory it would need.
    """
    timed = [batch for batch in found.batches if batch.time is not None and batch.fits is not False]
    charts = [_latency(found, timed), _throughput(found, timed)] if timed else []
    return [*charts, _memory_chart(found)] if found.batches else charts


def about(found: Inference) -> list[str]:
    """What the page of the figures says above them: what is served, on what, and the largest batch."""
    lines = [f"{each}." for each in head(found)]
    if found.device:
        lines.append(f"On {found.device}.")
    if found.largest_batch is not None:
        lines.append(largest(found.largest_batch))
    return lines


def _curves(found: Inference, rows: list[BatchRow]) -> Iterator[tuple[str, str, list[float], list[float]]]:
    """The bound and the expectation, where there is one: name, colour, milliseconds and tokens per second."""
    times = [row.time for row in rows if row.time is not None]
    rates = [row.bound_tokens_per_second or 0.0 for row in rows]
    sheet = times[0].basis == "bound"
    least = "at least, by the data sheet" if sheet else "matmuls and attention at measured rates"
    yield least, _BOUND, [time.bound_seconds * KILO for time in times], rates
    expected = [time.expected_seconds for time in times if time.expected_seconds is not None]
    if len(expected) == len(times):
        rates = [row.expected_tokens_per_second or 0.0 for row in rows]
        yield "expected", _EXPECTED, [each * KILO for each in expected], rates


def _latency(found: Inference, rows: list[BatchRow]) -> Chart:
    batches = [row.batch for row in rows]
    marks = [
        Line(batches, milliseconds, name, colour, symbol="circle", said=_batches_said(rows, milliseconds, rates))
        for name, colour, milliseconds, rates in _curves(found, rows)
    ]
    what = "one token of each sequence" if found.serving.phase == "decode" else "all tokens of all sequences"
    apart = [batch for batch, after in zip(batches, [*batches[1:], 0], strict=True) if not batch < after < 1.5 * batch]
    x = Axis("sequences at once", log=True, ticks={float(each): f"{each:,}" for each in apart})
    title = f"Batch and latency: {found.run.model.name}, {what}"
    return Chart(title, tuple(marks), x, Axis("milliseconds", zero=True))


def _throughput(found: Inference, rows: list[BatchRow]) -> Chart:
    texts = [f"{row.batch:,}" for row in rows]
    marks = [
        Line(
            milliseconds,
            rates,
            name,
            colour,
            symbol="circle",
            said=_batches_said(rows, milliseconds, rates),
            texts=texts,
        )
        for name, colour, milliseconds, rates in _curves(found, rows)
    ]
    title = f"Latency and tokens per second: {found.run.model.name}, each point a batch"
    x, y = Axis("milliseconds of a forward", zero=True), Axis("tokens per second of all sequences", zero=True)
    return Chart(title, tuple(marks), x, y)


def _batches_said(rows: list[BatchRow], milliseconds: list[float], rates: list[float]) -> list[str]:
    return [
        f"batch {row.batch:,}: {time:.4g} ms, {rate:,.0f} tokens/s"
        for row, time, rate in zip(rows, milliseconds, rates, strict=True)
    ]


def _memory_chart(found: Inference) -> Chart:
    beyond = [at for at, batch in enumerate(found.batches) if batch.fits is False]
    rows = found.batches[: beyond[0] + 1] if beyond else found.batches
    outside = "activations, and outside the tensors"
    parts = {
        "weights": [found.weights.nbytes / GIGA for _ in rows],
        "KV cache": [row.cache_nbytes / GIGA for row in rows],
        outside: [(row.device_nbytes - row.cache_nbytes - found.weights.nbytes) / GIGA for row in rows],
    }
    colours = {"weights": COLOURS[0], "KV cache": COLOURS[1]}
    bars = stacked(
        parts,
        colours,
        lambda name, row: f"batch {rows[row].batch:,}: {parts[name][row]:.3f} GB of {name}",
        thick=0.8,
        upright=True,
    )
    usable = None if found.memory is None else found.memory.usable_nbytes
    line = [] if found.memory is None else usable_memory(usable, "y", of_a_device(found.memory))
    x = Axis("sequences at once", names=tuple(f"{row.batch:,}" for row in rows))
    return Chart(f"Batch and memory: {found.run.model.name}", (*bars, *line), x, Axis("memory (GB)"))

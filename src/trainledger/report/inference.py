"""A served model for a terminal of 80 columns."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from trainledger.plan import in_json
from trainledger.predict.device_memory import TENSORS_ALONE, of_a_device
from trainledger.predict.serving import MOST_BATCH
from trainledger.report.table import sentence, table, wrapped
from trainledger.spec.serving import CACHE_FORMATS, WEIGHT_FORMATS, WHOLE
from trainledger.units import (
    KIB,
    counted,
    format_flops,
    format_gigabytes,
    format_nbytes,
    format_percent,
    format_seconds,
)

if TYPE_CHECKING:
    from trainledger.predict.serving import BatchRow, Inference


_ALWAYS = 3  # columns of the table of batches that are never empty


def text(told: Inference) -> str:
    """The whole account."""
    return "\n\n".join(_parts(told))


def _parts(told: Inference) -> Iterator[str]:
    yield "\n".join(wrapped(each) for each in head(told))
    yield _memory(told)
    yield _forward(told)
    if told.time is not None:
        yield "\n".join(wrapped(each) for each in _time(told))
    if told.batches:
        yield _batches(told)
    if told.notes:
        yield "\n".join(wrapped(sentence(each)) for each in told.notes)


def head(told: Inference) -> Iterator[str]:
    """What is served and in which formats, a line each."""
    serving, tensor = told.serving, told.run.layout.tensor
    sequences = counted(serving.batch, "sequence")
    if serving.phase == "prefill":
        yield f"{told.run.model.name}, prefill: the {serving.context:,} tokens of each of {sequences}"
    else:
        yield f"{told.run.model.name}, decode: one more token of {sequences}, the last of {serving.context:,}"
    weights, cache = WEIGHT_FORMATS[serving.weights], CACHE_FORMATS[serving.cache]
    which = " (experts only)" if serving.quantized == "experts" and serving.weights not in WHOLE else ""
    yield f"Weights in {serving.weights}{which}: {weights.title}; cache in {serving.cache}: {cache.title}"
    if tensor > 1:
        yield f"On {tensor} tensor ranks; what follows is one of them"


def _memory(told: Inference) -> str:
    weights, serving = told.weights, told.serving
    rows = []
    if weights.codes:
        rows += [[f"weights in {serving.weights}", format_nbytes(weights.codes), f"{weights.codes:,}"],
                 ["their scales", format_nbytes(weights.scales), f"{weights.scales:,}"],
                 ["weights that stay whole", format_nbytes(weights.whole), f"{weights.whole:,}"]]  # fmt: skip
    rows += [["all weights", format_nbytes(weights.nbytes), f"{weights.nbytes:,}"],
             ["cache", format_nbytes(told.cache_nbytes), f"{told.cache_nbytes:,}"]]  # fmt: skip
    peak = told.ledger.peak().nbytes
    rest = peak - weights.nbytes - told.cache_nbytes
    rows.append(["activations and buffers", format_nbytes(rest), f"{rest:,}"])
    if told.memory is not None:
        around = told.memory.nbytes - peak
        counted_around = ["not counted", ""] if told.memory.tensors_alone else [format_nbytes(around), f"{around:,}"]
        rows.append(["around the tensors", *counted_around])
        rows.append(["in all", format_nbytes(told.memory.nbytes), f"{told.memory.nbytes:,}"])
    lines = [_token_line(told)]
    if told.memory is not None and told.memory.tensors_alone:
        lines.append(sentence(TENSORS_ALONE))
    if told.memory is not None and told.memory.usable_nbytes is not None:
        fits = "Fits in" if told.memory.fits else "Does NOT fit in"
        lines.append(f"{fits} the {format_nbytes(told.memory.usable_nbytes)} {of_a_device(told.memory)}.")
    return "\n".join([table(["held", "", "bytes"], rows, align="lrr"), *(wrapped(each) for each in lines)])


def _token_line(told: Inference) -> str:
    one = f"One token takes {told.token_nbytes:,} bytes ({told.token_nbytes / KIB:.4g} KiB) of the cache"
    if told.run.layout.tensor > 1:
        one += f" of a rank, {told.whole_token_nbytes / KIB:.4g} KiB of the whole model's"
    if told.run.model.attention.window is not None:
        one += f"; layers with a window keep at most {told.run.model.attention.window:,} tokens"
    return one + "."


def _forward(told: Inference) -> str:
    everything = sum(told.moved_nbytes.values())
    rows = [
        [name, format_nbytes(nbytes), format_percent(nbytes / everything)] for name, nbytes in told.moved_nbytes.items()
    ]
    rows.append(["moved in all", format_nbytes(everything), ""])
    rows.append(["FLOPs of products", format_flops(told.ledger.matmul_flops), ""])
    ridge = "" if told.ridge is None else f"ridge {told.ridge:.4g}"
    rows.append(["FLOPs per byte", f"{told.intensity:.4g}", ridge])
    return table(["one forward", "", ""], rows, align="lrr")


def _time(told: Inference) -> Iterator[str]:
    time, serving = told.time, told.serving
    assert time is not None
    rate = told.bound_tokens_per_second
    assert rate is not None
    sheet = time.basis == "bound"
    least, most = ("at least", "at most") if sheet else ("about", "about")
    yield (
        f"On {told.device} {least} {format_seconds(time.bound_seconds)}, {time.limit}-bound: "
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
    links = f", and {_between(told)}: {link_seconds} of it" if told.collectives else ""
    yield f"That is products and attention at {rates}, everything else fused into them{links}."
    expected, between = told.expected_tokens_per_second, time.expected_link_seconds
    if time.expected_seconds is not None and expected is not None:
        yield (
            f"Expected, every operation a kernel of its own at the rates of the calibration: "
            f"{format_seconds(time.expected_seconds)}, {_rate(expected)} tokens/s"
            + (f"; {_between(told)} take {format_seconds(between)} of it" if between else "")
            + "."
        )


def _between(told: Inference) -> str:
    """What tensor ranks send each other in one forward, such as ``161 all-reduces between tensor ranks``."""
    named = [counted(times, name.replace("_", "-")) for name, times in told.collectives.items()]
    return f"{' and '.join(named)} between tensor ranks"


def _rate(tokens_per_second: float) -> str:
    return f"{tokens_per_second:,.4g}" if tokens_per_second < 9999.5 else f"{tokens_per_second:,.0f}"


def _batches(told: Inference) -> str:
    rows = [_row(each) for each in told.batches]
    measured = any(each.time is not None and each.time.basis != "bound" for each in told.batches)
    least = "about" if measured else "at least"
    columns = ["batch", "cache", "held", least, "tokens/s", "bound", ""]
    filled = [at for at, name in enumerate(columns) if at < _ALWAYS or any(row[at] for row in rows)]
    shown = table([columns[at] for at in filled], [[row[at] for at in filled] for row in rows],
                  align="".join("rrrrrll"[at] for at in filled))  # fmt: skip
    return shown if told.largest_batch is None else f"{shown}\n{largest(told.largest_batch)}"


def largest(batch: int) -> str:
    """A sentence for the largest batch that fits, 0 where none does; more than `MOST_BATCH` are not tried.

    >>> largest(61), largest(0)
    ('The largest batch that fits is 61.', 'Not even one sequence fits.')
    """
    if batch == MOST_BATCH:
        return f"A batch of {batch:,} fits; larger ones are not tried."
    return f"The largest batch that fits is {batch:,}." if batch else "Not even one sequence fits."


def _row(each: BatchRow) -> list[str]:
    fits = {True: "", False: "too large", None: ""}[each.fits]
    held = format_gigabytes(each.device_nbytes)
    if each.time is None or each.bound_tokens_per_second is None:
        return [f"{each.batch:,}", format_nbytes(each.cache_nbytes), held, "", "", "", fits]
    return [
        f"{each.batch:,}", format_nbytes(each.cache_nbytes), held, format_seconds(each.time.bound_seconds),
        _rate(each.bound_tokens_per_second), each.time.limit, fits,
    ]  # fmt: skip


def to_json(told: Inference) -> dict[str, Any]:
    """The account as JSON takes it."""
    weights = {f"{name}_nbytes": nbytes for name, nbytes in vars(told.weights).items()}
    return {
        "run": in_json.run(told.run), "serving": vars(told.serving), "device_title": told.device,
        "parameters": told.ledger.parameters, "weights": {**weights, "nbytes": told.weights.nbytes},
        "cache_nbytes": told.cache_nbytes, "cache_token_nbytes": told.token_nbytes,
        "cache_token_nbytes_of_all_ranks": told.whole_token_nbytes, "peak_nbytes": told.ledger.peak().nbytes,
        "device_memory": in_json.device_memory(told.memory), "fits": told.fits, "moved_nbytes": told.moved_nbytes,
        "matmul_flops": told.ledger.matmul_flops, "intensity": told.intensity, "ridge": told.ridge,
        "time": None if told.time is None else vars(told.time),
        "bound_tokens_per_second": told.bound_tokens_per_second,
        "expected_tokens_per_second": told.expected_tokens_per_second, "collectives": told.collectives,
        "batches": [{**vars(each), "time": None if each.time is None else vars(each.time)} for each in told.batches],
        "largest_batch": told.largest_batch, "notes": told.notes,
    }  # fmt: skip

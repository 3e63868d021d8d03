"""Lines of an answer about rows of uneven length: what is padding, what packing saves, which batch is the largest."""

from __future__ import annotations

from collections.abc import Iterator

from trainledger.forecast.plan.plan import Plan
from trainledger.spec.units import ceil_div, format_percent, format_seconds


def lines_of(plan: Plan) -> Iterator[tuple[str, str]]:
    """What a plan says of its rows; nothing where all are full."""
    rows, recipe, forecast = plan.padding, plan.run.recipe, plan.forecast
    if rows is None:
        return
    cut = f" ({rows.cut:,} cut at {recipe.seq_len:,})" if rows.cut else ""
    mean = f"{rows.rows:,} rows{cut} of {rows.tokens / rows.rows:,.0f} tokens in the mean"
    yield from (("counted", note) for note in plan.run.origin.notes if note.startswith("data.lengths counts"))
    longest = f"padded to the longest of {rows.micro_batch:,}: {rows.padded:,.0f}" if rows.micro_batch > 1 else "alone"
    waste = format_percent(rows.waste)
    yield "rows", f"{mean}, {longest}; {waste} of the tokens computed are padding, which MFU counts"
    saved = rows.saved(forecast.step_seconds, recipe.seq_len)
    if saved is not None and forecast.step_seconds and rows.packed_step_seconds:
        padded = ceil_div(rows.rows, recipe.global_batch) * forecast.step_seconds
        packed = rows.tokens / recipe.tokens_per_step * rows.packed_step_seconds
        epoch = f"an epoch {format_seconds(packed)} instead of {format_seconds(padded)}"
        step = f"a step {format_seconds(rows.packed_step_seconds)}, of {recipe.tokens_per_step:,} tokens"
        yield "packed", f"{epoch} ({format_percent(abs(saved))} {'less' if saved > 0 else 'more'}); {step}"
    text = f"memory is that of a batch with a row of {rows.longest:,}; nine in ten have at most {rows.usual:,}"
    if forecast.fits is False and rows.fitting is None:
        text += "; not even the shortest fits"
    elif forecast.fits is False:
        longer = format_percent(1 - rows.share)
        text += f"; rows up to {rows.fitting:,} fit, {longer} of the batches have a longer one and run out"
    yield "largest", text

"""Write docs/published_throughput.md: predicted step times and device-hours beside published ones.

``python tools/published/throughput_page.py`` writes it from what `fit_devices.py` and `throughput_hours.py` have
stored; tests compare the page with what it would write, and what is stored with what would be predicted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from throughput_blackwell import LEFT_OUT
from throughput_case import CALIBRATED, TimeSource
from throughput_hours import LEFT_OUT as HOURS_LEFT_OUT
from throughput_hours import PredictedHours, read_hours, whole_runs
from throughput_predictions import (
    HOURS,
    MEDIAN,
    NAMES,
    WITHIN,
    PredictedCase,
    counting,
    errors,
    percent,
    predicted_cases,
    sources,
    ways,
)
from throughput_ranks import ranks
from throughput_runs import NO_FIGURE

from trainledger import catalog
from trainledger.forecast.predict.step import CAUSES

PAGE = Path(__file__).parents[2] / "docs" / "published_throughput.md"

HEAD = """\
# Published and predicted throughput

Written by `python tools/published/throughput_page.py` from what `python tools/published/fit_devices.py` (step times)
and `python tools/published/throughput_hours.py` (whole runs) have stored; tests compare the page, and the stored
numbers with what is predicted today. The rows are those of `runs.csv` and `blackwell_runs.csv` in `tools/published`,
and some of its `nemo_runs.csv`.

Of every row that says enough, a run is made, and its step is timed as `trainledger plan` times it: every operation of
the ledger on the device (`predict.kernel`), collectives over the links (`predict.collective`), streams and pipelines
(`predict.parallel_step`). A device type has one calibration, {constants} constants fitted on its rows together;
no constant belongs to a source or a row, and links are the catalog's. {unfitted} rows are predicted but not fitted on:
ZeRO-3 of early 2021 over many nodes, whose lost time would be taken for the network's. What a row does not say is
assumed for its whole source, in words, below. Error is predicted over measured seconds of a step, less one.

"Left out" is the prediction of a source by the constants fitted on all other sources of its device type: what to expect
of a run that was not measured yet (docs/accuracy.md has its interval). "In the sample" are the constants of the
catalog, which are fitted on these rows. Mechanisms that were missing were looked for in these rows, which leaving a
source out does not undo. NVIDIA's sources share a program: predicted from the others all together, before any of them
was fitted on, they were predicted 12 % too slow (docs/unseen_throughput.md).

| rows | | left out: median absolute error | within 25 % | in the sample: median | within 25 % |
|---|--:|--:|--:|--:|--:|
"""

CONSTANTS = """\

Shares are of the data sheet: `matmul_share` of the peak inside a large matmul in 16 bits, `float8_share` in 8;
`attention_share` and `attention_backward_share` of it in fused attention on long sequences; `bandwidth_share` of the
memory's rate in elementwise kernels. `depth` is the inner length k of a matmul that takes as long as the start and
the end of a tile, `attention_length` the number of keys at which attention reaches half of its share.
`kernel_seconds` is the least time of a kernel, `launch_seconds` what the program needs to launch one (all of it is
added where the program waits for each: `recipe.launch_blocking`); where no row of a type waits for launches it is what
rows on A100 and steps on an H200 give (47 to 54 microseconds there). `contention_share` of a collective's time is lost
to overlapping compute; `straggler_share` of a step is added for each doubling of the nodes. `network_share` of what a
benchmark of one collective alone reaches between nodes is reached by those of a step, whose ranks come at different
times and whose groups all talk at once; 1 where the rows show nothing of it.

What the sources below say of their networks and programs are fields of a run file: `cluster.network_bytes_per_second`
(the data sheet's rate for each device), `cluster.network_reached_bytes_per_second` (as it was measured),
`layout.split_sends` (tensor ranks each send a part of an activation to the next stage), `recipe.launch_blocking`.
"""


def page() -> str:
    """The whole page."""
    constants = sum(isinstance(getattr(catalog.efficiency("a100-sxm-80gb"), each.name), float) for each in _fields())
    unfitted = sum(not each.case.fitted for each in predicted_cases()[0])
    parts = [HEAD.format(constants=constants, unfitted=unfitted), *_totals(), "\n## By source\n\n", *_by_source()]
    parts += ["\n## Ranks\n\n", *ranks(), "\n## What the calibrations say\n\n", *_constants()]
    parts += ["\n## Sources above 15 %\n\n", *_above(), "\n## Whole runs\n\n", *_hours()]
    parts += ["\n## What is assumed, source by source\n", *(_assumed(each) for each in sources())]
    parts += ["\n## All rows\n", *_all_rows(), "\n## Left out\n\n", *_left_out()]
    return "".join(parts)


def _fields() -> tuple[Any, ...]:
    found = catalog.efficiency("a100-sxm-80gb")
    assert found is not None
    return fields(found)


def _totals() -> Iterator[str]:
    yield _total("**A100, H100 and TPU**", counting())
    for name in CALIBRATED:
        yield _total(NAMES[name], [each for each in predicted_cases()[0] if each.case.calibration == name])


def _total(name: str, some: Sequence[PredictedCase]) -> str:
    inside, outside = errors(some), errors(some, left_out=True)
    cells = (name, str(len(some)), *(percent(each) for each in (
        outside.median, outside.within(WITHIN), inside.median, inside.within(WITHIN))))  # fmt: skip
    return f"| {' | '.join(cells)} |\n"


def _by_source() -> Iterator[str]:
    yield "| source | device | rows | left out: median absolute error | median error | worst | within 25 % | "
    yield "in the sample: median |\n|---|---|--:|--:|--:|--:|--:|--:|\n"
    for source, some in sources().items():
        for name in CALIBRATED:
            of = [each for each in some if each.case.calibration == name]
            if of:
                found = errors(of, left_out=True)
                cells = (
                    source.title, NAMES[name], str(len(of)), percent(found.median), percent(found.bias, sign=True),
                    percent(found.worst, sign=True), percent(found.within(WITHIN)),
                    percent(errors(of).median),
                )  # fmt: skip
                yield f"| {' | '.join(cells)} |\n"


def _constants() -> Iterator[str]:
    devices = [devices[0] for devices in CALIBRATED.values()]
    yield f"| constant | {' | '.join(NAMES[name] for name in CALIBRATED)} |\n|---|{'--:|' * len(devices)}\n"
    for each in _fields():
        name = each.name
        values = [getattr(catalog.efficiency(device), name) for device in devices]
        if all(isinstance(value, float) for value in values):
            yield f"| {name} | {' | '.join(f'{value:.4g}' for value in values)} |\n"
    yield CONSTANTS


def _above() -> Iterator[str]:
    far = [source for source, some in sources().items() if errors(some).median > MEDIAN]
    if not far:
        yield "None.\n"
    for source in far:
        some = sources()[source]
        yield f"- {source.title} ({percent(errors(some).bias, sign=True)}): {source.reason or 'not found'}.\n"


FAMILIES = (
    ("LLaMA", "R0219", "R0222"), ("Llama 2", "R0225", "R0227"), ("Llama 3", "R0228", "R0229"),
    ("Llama 3.1", "R0230", "R0232"), ("Pythia", "R0973", "R0980"),
    ("Llama 2", "R0981", "R0981"),  # the 34B, one of the four in its paper's total of 3,311,616 hours
)  # fmt: skip


def families() -> dict[str, list[PredictedHours]]:
    """Whole runs by the family of their model, and all others one by one."""
    names = {each.row["id"]: each.row["model_family"] for each in whole_runs()}
    split: dict[str, list[PredictedHours]] = {}
    for each in read_hours():
        name = next((name for name, first, last in FAMILIES if first <= each.row <= last), names[each.row])
        split.setdefault(name, []).append(each)
    return split


def _hours() -> Iterator[str]:
    yield (
        "Tokens and device-hours are published, the layout mostly is not: each run lists its assumptions. "
        "Failures, checkpoints and evaluations are as published for others on the same devices (`catalog/"
        "reliability.toml`).\n\n"
    )
    runs = {each.row["id"]: each for each in whole_runs()}
    stored = read_hours()
    yield "| family | runs | published hours | predicted | error |\n|---|--:|--:|--:|--:|\n"
    for name, some in families().items():
        hours, predicted = sum(each.hours for each in some), sum(each.predicted for each in some)
        error = percent(predicted / hours - 1, sign=True)
        at_most = "at most " if any(runs[each.row].at_most for each in some) else ""
        yield f"| {name} | {len(some)} | {at_most}{hours:,.0f} | {predicted:,.0f} | {error} |\n"
    yield "\n"
    exact = [each for each in stored if not runs[each.row].at_most]
    good = sum(abs(each.error) <= HOURS for each in exact)
    yield f"{good} of {len(exact)} runs are within 25 %."
    for each in stored:
        whole = runs[each.row]
        if whole.at_most:
            kept = "stays below it" if each.predicted <= each.hours else "is above it"
            yield f" Of {whole.name} only an upper bound is published; the prediction {kept}: {whole.reason}."
    yield "\n\n"
    yield "| run | device | published hours | predicted | error | MFU | assumed |\n|---|---|--:|--:|--:|--:|---|\n"
    for each in stored:
        whole = runs[each.row]
        cells = (
            whole.name, whole.run.cluster.device, f"{'at most ' * whole.at_most}{each.hours:,.0f}",
            f"{each.predicted:,.0f}",
            percent(each.error, sign=True), percent(each.mfu), whole.assumed,
        )  # fmt: skip
        yield f"| {' | '.join(cells)} |\n"
    far = [each for each in exact if abs(each.error) > HOURS]
    if far:
        yield "\nFurther off:\n\n"
        yield from (f"- {runs[each.row].name}: {runs[each.row].reason or 'not found'}.\n" for each in far)
    causes = list(dict.fromkeys(cause for each in stored for cause, _ in each.bars))
    yield "\nWaterfalls, as shares of the published hours; the bars sum to the prediction:\n\n"
    yield f"| run | {' | '.join(causes)} | sum |\n|---|{'--:|' * (len(causes) + 1)}\n"
    for each in stored:
        bars = dict(each.bars)
        shares = (f"{100 * bars[cause] / each.hours:.1f}" if cause in bars else "" for cause in causes)
        yield f"| {runs[each.row].name} | {' | '.join(shares)} | {100 * each.predicted / each.hours:.1f} |\n"
    yield (
        "\nHours that are not predicted: " + "; ".join(f"{row} ({why})" for row, why in HOURS_LEFT_OUT.items()) + ".\n"
    )


def _assumed(source: TimeSource) -> str:
    lines = [f"\n### {source.title}\n\n`{source.name}`. Measured: {source.convention}.\n\n"]
    return "".join(lines + [f"- {line}\n" for line in source.assumed])


SHORT = ("ideal", "recomputed", "kernels", "memory", "launch", "exposed", "bubble", "stragglers")


def _all_rows() -> Iterator[str]:
    yield f"\nSeconds of a step, and what the prediction goes to in percent: {', '.join(CAUSES)}.\n"
    for source, some in sources().items():
        yield f"\n### {source.title}: rows\n\n"
        yield "| row | model | devices | layout | batch x length | measured | predicted | error | left out | "
        yield f"{' | '.join(SHORT)} |\n"
        yield f"|---|---|--:|---|--:|--:|--:|--:|--:|{'--:|' * len(SHORT)}\n"
        yield from (_row(each) for each in some)


def _row(each: PredictedCase) -> str:
    case, run, stored = each.case, each.case.run, each.stored
    cells = (
        case.name, case.row["model_family"], str(run.layout.devices), ways(run.layout),
        f"{run.grad_accum} x {run.device_batch} x {run.recipe.seq_len}", f"{stored.measured:.4g}",
        f"{stored.seconds:.4g}", percent(each.error, sign=True), percent(each.error_left_out, sign=True),
        *(f"{100 * cause / stored.seconds:.0f}" for cause in stored.causes),
    )  # fmt: skip
    return f"| {' | '.join(cells)} |\n"


def _left_out() -> Iterator[str]:
    left_out = predicted_cases()[1]
    counts = Counter((row["source"].split("/results/")[0], why) for row, why in left_out if why != NO_FIGURE)
    yield "| source | rows | why |\n|---|--:|---|\n"
    yield from (f"| {source} | {count} | {why} |\n" for (source, why), count in sorted(counts.items()))
    silent = sum(why == NO_FIGURE for _, why in left_out)
    yield f"| {len({row['source'] for row, why in left_out if why == NO_FIGURE})} sources | {silent} | {NO_FIGURE} |\n"
    yield "\nOf NVIDIA's figures of Blackwell:\n\n"
    yield from (f"- {what}: {why}.\n" for what, why in LEFT_OUT)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")

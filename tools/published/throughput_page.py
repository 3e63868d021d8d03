"""Write docs/published_throughput.md: predicted step times and device-hours beside published ones.

``python tools/published/throughput_page.py`` writes it from what `fit_devices.py` and `throughput_hours.py` have
stored; tests compare the page with what it would write, and what is stored with what would be predicted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import fields

from published_sources import LEFT_OUT, REASONS, REMARKS
from tables import Page, Table, markdown
from throughput_case import CALIBRATED
from throughput_hours import PredictedHours, read_hours, whole_runs
from throughput_predictions import (
    ENOUGH,
    HOURS,
    MEDIAN,
    NAMES,
    RANKS,
    WITHIN,
    PredictedCase,
    agreement,
    ceiling,
    counting,
    errors,
    layouts_of_one_model,
    percent,
    predicted_cases,
    ranked,
    sources,
    unseen_of,
    ways,
)
from throughput_runs import NO_FIGURE

from trainledger import catalog
from trainledger.forecast.predict.step import CAUSES
from trainledger.spec.device import Efficiency

HEAD = """\
# Published and predicted throughput

Written by `python tools/published/throughput_page.py` from what `python tools/published/fit_devices.py` (step times)
and `python tools/published/throughput_hours.py` (whole runs) have stored; tests compare the page, and the stored
numbers with what is predicted today. The rows are those of `runs.csv` and `blackwell_runs.csv` in `tools/published`,
and some of its `nemo_runs.csv`.

Of every row that says enough, a run is made, and its step is timed as `trainledger plan` times it: every operation of
the ledger on the device (`forecast.predict.kernel`), collectives over the links (`forecast.predict.collective`),
streams and pipelines (`forecast.predict.parallel_step`). A device type has one calibration, {constants} constants
fitted on its rows together; no constant belongs to a source or a row, and links are the catalog's. {unfitted} rows are
predicted but not fitted on:
ZeRO-3 of early 2021 over many nodes, whose lost time would be taken for the network's. What a row does not say is
assumed for its whole source, in words: `sources.toml` there. Error is predicted over measured seconds of a step, less
one.

"Left out" is the prediction of a source by the constants fitted on all other sources of its device type: what to expect
of a run that was not measured yet (docs/accuracy.md has its interval). "In the sample" are the constants of the
catalog, which are fitted on these rows. Mechanisms that were missing were looked for in these rows, which leaving a
source out does not undo. NVIDIA's sources share a program: predicted from the others all together, before any of them
was fitted on, they were predicted 12 % too slow (docs/unseen_throughput.md).

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


def page() -> Page:
    """The whole page with its tables."""
    constants = sum(isinstance(getattr(catalog.efficiency("a100-sxm-80gb"), name), float) for name in _CONSTANTS)
    unfitted = sum(not each.case.fitted for each in predicted_cases()[0])
    tables = by_source, ranks, hours, rows, left_out = _by_source(), _ranks(), _hours(), _rows(), _left_out()
    parts = [HEAD.format(constants=constants, unfitted=unfitted), _totals()]
    parts += [f"\nSource by source: {by_source.link}. Every row, with what its time goes to: {rows.link}. "]
    parts += [f"Rows that are not predicted, and why: {left_out.link}.\n\n## Ranks\n\n", *_on_ranks(ranks)]
    parts += ["\n## What the calibrations say\n\n", *_constants(), "\n## Sources above 15 %\n\n", *_above()]
    return Page("published_throughput", "".join([*parts, "\n## Whole runs\n\n", *_on_hours(hours)]), tables)


_CONSTANTS = [each.name for each in fields(Efficiency)]


def _totals() -> str:
    of_each = {name: [each for each in predicted_cases()[0] if each.case.calibration == name] for name in CALIBRATED}
    shown = {"**A100, H100 and TPU**": counting(), **{NAMES[name]: some for name, some in of_each.items()}}
    header = (
        "device type",
        "rows:",
        "left out: median absolute error:",
        "within 25 %:",
        "in the sample: median:",
        "within 25 %:",
    )
    return markdown(header, (_total(name, some) for name, some in shown.items()))


def _total(name: str, some: Sequence[PredictedCase]) -> Sequence[str]:
    outside, inside = errors(some, left_out=True), errors(some)
    shares = (outside.median, outside.within(WITHIN), inside.median, inside.within(WITHIN))
    return name, str(len(some)), *map(percent, shares)


def _by_source() -> Table:
    rows = []
    for source, some in sources().items():
        for name in CALIBRATED:
            of = [each for each in some if each.case.calibration == name]
            if of:
                left_out = errors(of, left_out=True)
                signed = (percent(share, sign=True) for share in (left_out.bias, left_out.worst))
                shares = (percent(left_out.median), *signed, percent(left_out.within(WITHIN)))
                rows.append((source.title, source.name, NAMES[name], str(len(of)), *shares, percent(errors(of).median)))
    header = ("source", "name", "device", "rows", "left out: median absolute error %", "median error %", "worst %")
    return Table("throughput_sources", (*header, "rows within 25 %", "in the sample: median absolute error %"), rows)


def _ranks() -> Table:
    rows = []
    for source, some in ranked():
        others = unseen_of(source)
        cells = ["", "", ""]
        if len(others) >= ENOUGH:
            cells = [str(len(others)), f"{agreement(others):.3f}", f"{agreement([*some, *others]):.3f}"]
        rows.append((source.title, "", str(len(some)), f"{agreement(some):.3f}", *cells))
    for source, model, alone in layouts_of_one_model():
        rows.append((source.title, model, str(len(alone)), f"{agreement(alone):.3f}", "", "", ""))
    header = ("source", "of one model", "rows", "correlation", "unseen rows", "correlation of unseen", "all together")
    return Table("throughput_ranks", header, rows)


def _on_ranks(table: Table) -> Iterator[str]:
    found = [agreement(some) for _, some in ranked()]
    yield (
        f"Spearman's correlation of predicted and measured seconds of a step, of the {len(found)} sources with "
        f"{ENOUGH} rows or more on one type of device: at least {RANKS} in {sum(each >= RANKS for each in found)} of "
        f"them, {table.link}. `unseen` are rows of the same source that are not in `runs.csv` and that nothing was "
        f"fitted on (docs/unseen_throughput.md). Below {RANKS}:\n\n"
    )
    for source, some in ranked():
        if agreement(some) < RANKS:
            reason = REASONS["ranks"][source.title]
            without = agreement([each for each in some if each.case.name not in reason["rows"]])
            yield (
                f"- {source.title}, {agreement(some):.3f}: {reason['why']}. Without {', '.join(reason['rows'])} it is "
                f"{without:.3f}; with them unchanged and all others predicted exactly it would be "
                f"{ceiling(some, reason['rows']):.3f}.\n"
            )
    lowest = min(agreement(some) for _, _, some in layouts_of_one_model())
    yield (
        f"\nOf one model alone, where nothing but the layout and the micro-batch differ, it goes down to {lowest:.3f}. "
        f"{REMARKS['layouts']}\n"
    )


def _constants() -> Iterator[str]:
    found = [catalog.efficiency(devices[0]) for devices in CALIBRATED.values()]
    values = {name: [getattr(each, name) for each in found] for name in _CONSTANTS}
    rows = [(name, *(f"{each:.4g}" for each in of)) for name, of in values.items() if all(type(x) is float for x in of)]
    yield markdown(("constant", *(f"{NAMES[name]}:" for name in CALIBRATED)), rows)
    yield CONSTANTS


def _above() -> Iterator[str]:
    far = {source: some for source, some in sources().items() if errors(some).median > MEDIAN}
    for source, some in far.items():
        yield f"- {source.title} ({percent(errors(some).bias, sign=True)}): {source.reason or 'not found'}.\n"
    if not far:
        yield "None.\n"


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


def _hours() -> Table:
    runs = {each.row["id"]: each for each in whole_runs()}
    causes = list(dict.fromkeys(cause for each in read_hours() for cause, _ in each.bars))
    rows = []
    for each in read_hours():
        whole, bars = runs[each.row], dict(each.bars)
        shares = (f"{100 * bars[cause] / each.hours:.1f}" if cause in bars else "" for cause in causes)
        hours = f"{'at most ' * whole.at_most}{each.hours:,.0f}", f"{each.predicted:,.0f}"
        figures = (*hours, percent(each.error, sign=True), percent(each.mfu))
        rows.append((whole.name, whole.run.cluster.device, *figures, *shares, whole.assumed))
    header = ("run", "device", "published hours", "predicted hours", "error %", "MFU %")
    return Table("throughput_hours", (*header, *(f"{cause}, % of published" for cause in causes), "assumed"), rows)


def _on_hours(table: Table) -> Iterator[str]:
    yield (
        "Tokens and device-hours are published, the layout mostly is not. Failures, checkpoints and evaluations are as "
        "published for others on the same devices (`catalog/reliability.toml`). Each run with its assumptions, and "
        f"what its hours go to: {table.link}.\n\n"
    )
    runs = {each.row["id"]: each for each in whole_runs()}
    rows = []
    for name, some in families().items():
        hours, predicted = sum(each.hours for each in some), sum(each.predicted for each in some)
        at_most = "at most " if any(runs[each.row].at_most for each in some) else ""
        error = percent(predicted / hours - 1, sign=True)
        rows.append((name, str(len(some)), f"{at_most}{hours:,.0f}", f"{predicted:,.0f}", error))
    yield markdown(("family", "runs:", "published hours:", "predicted:", "error:"), rows)
    exact = [each for each in read_hours() if not runs[each.row].at_most]
    yield f"\n{sum(abs(each.error) <= HOURS for each in exact)} of {len(exact)} runs are within 25 %."
    for each in read_hours():
        whole = runs[each.row]
        if whole.at_most:
            kept = "stays below it" if each.predicted <= each.hours else "is above it"
            yield f" Of {whole.name} only an upper bound is published; the prediction {kept}: {whole.reason}."
    yield "\n"
    far = [each for each in exact if abs(each.error) > HOURS]
    if far:
        yield "\nFurther off:\n\n"
        yield from (f"- {runs[each.row].name}: {runs[each.row].reason or 'not found'}.\n" for each in far)


def _rows() -> Table:
    rows = []
    for source, some in sources().items():
        for each in some:
            case, run, stored = each.case, each.case.run, each.stored
            sizes = f"{run.grad_accum} x {run.device_batch} x {run.recipe.seq_len}"
            shape = (case.name, case.row["model_family"], str(run.layout.devices), ways(run.layout), sizes)
            seconds = (f"{stored.measured:.4g}", f"{stored.seconds:.4g}")
            off = (percent(share, sign=True) for share in (each.error, each.error_left_out))
            causes = (f"{100 * cause / stored.seconds:.0f}" for cause in stored.causes)
            rows.append((source.title, *shape, *seconds, *off, *causes))
    header = ("source", "row", "model", "devices", "layout", "batch x length", "measured s", "predicted s", "error %")
    return Table("throughput_rows", (*header, "left out: error %", *(f"{cause}, %" for cause in CAUSES)), rows)


def _left_out() -> Table:
    left_out = predicted_cases()[1]
    counts = Counter((row["source"].split("/results/")[0], why) for row, why in left_out if why != NO_FIGURE)
    rows = [(source, str(count), why) for (source, why), count in sorted(counts.items())]
    silent = [row["source"] for row, why in left_out if why == NO_FIGURE]
    rows.append((f"{len(set(silent))} sources", str(len(silent)), NO_FIGURE))
    rows += [(f"NVIDIA, Blackwell: {what}", "", why) for what, why in LEFT_OUT["blackwell"].items()]
    rows += [(row, "", f"device-hours: {why}") for row, why in LEFT_OUT["hours"].items()]
    return Table("throughput_left_out", ("source", "rows", "why"), rows)


if __name__ == "__main__":
    page().write()

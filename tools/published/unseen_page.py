"""Write docs/unseen_throughput.md: what was predicted of published steps that nothing was fitted on.

``python tools/published/unseen_page.py`` writes it from what ``unseen_runs.py`` has stored; tests compare both.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from left_out import read_left_out
from published_case import Errors
from published_sources import LEFT_OUT, REMARKS, TimeSource
from tables import Page, Table, markdown
from throughput_predictions import ENOUGH, NAMES, WITHIN, agreement, percent, ranked, sources, ways
from unseen_runs import Unseen, unseen

HEAD = """\
# Published steps that nothing was fitted on

Written by `python tools/published/unseen_page.py` from what `python tools/published/unseen_runs.py` has stored; tests
compare both with what is predicted today.

The calibrations of the catalog are fitted on the rows of docs/published_throughput.md. What follows are other steps of
the same tables, and of later ones. No constant was ever fitted on them and none will be. So the table says what to
expect of a prediction for the next run, on a device type that others have been measured on.

All were predicted for the first time on 2026-11-21, after the assumptions were written down. (Of vTrain's table
of many nodes one figure had been looked at before: its correlation.) BigScience's and vTrain's have met no other
constants since. Of NVIDIA's 169 steps, of models of 5B to 405B on 4 to 2,304 H100, in bf16 and fp8, none had been
fitted on then: median absolute error 11.7 %, nearly all predicted too slow, 94.7 % within 25 %, rank correlation 0.981.
Nine of them were corrected for a fact (the program's setting of attention kernels), and 41 are fitted on since:
containers of 2024, each layout on its fewest devices. Left are the same layouts on more devices and later ones.

"Source left out" are constants fitted without the other rows of the same source (`left_out.py`): what to expect for an
unknown program and cluster. The catalog's constants have met most of these sources, which says what to expect of a
further run of them.

"""


def unseen_sources() -> dict[TimeSource, list[Unseen]]:
    split: dict[TimeSource, list[Unseen]] = {}
    for each in unseen():
        split.setdefault(each.case.source, []).append(each)
    return split


def errors_of(some: Sequence[Unseen]) -> Errors:
    return Errors(tuple(each.error for each in some))


def left_out_of(some: Sequence[Unseen]) -> Errors:
    """The errors by constants that are fitted on no row of the source either."""
    stored = {name: each.left_out for name, each in read_left_out().items()}
    seconds = [stored[each.case.name] or each.seconds for each in some]
    return Errors(tuple(each / one.measured - 1 for each, one in zip(seconds, some, strict=True)))


def page() -> Page:
    """The whole page with its table."""
    rows = _rows()
    parts = [HEAD, _table(), f"\nEvery step: {rows.link}.\n\n## What is assumed\n\n", *_assumed()]
    parts += ["\n## Left out of NVIDIA's pages\n\n", *(f"- {what}: {why}.\n" for what, why in LEFT_OUT["nemo"].items())]
    return Page("unseen_throughput", "".join(parts), [rows])


def _table() -> str:
    known = dict(ranked())
    rows = []
    for source, some in unseen_sources().items():
        ranks = ("", "")
        if len(some) >= ENOUGH:
            ranks = (f"{agreement(some):.3f}", f"{agreement([*some, *known[source]]):.3f}" if source in known else "")
        rows.append(_line(source.title, NAMES[some[0].case.calibration], some, ranks))
    header = ("source", "device", "rows:", "source left out: median absolute error:", "by the catalog: median:")
    header = (*header, "median error:", "worst:", "within 25 %:", "rank correlation:", "with those fitted on:")
    return markdown(header, [*rows, _line("**all**", "", unseen(), ("", ""))])


def _line(title: str, device: str, some: Sequence[Unseen], ranks: tuple[str, str]) -> Sequence[str]:
    found = errors_of(some)
    signed = (percent(share, sign=True) for share in (found.bias, found.worst))
    shares = (percent(left_out_of(some).median), percent(found.median), *signed, percent(found.within(WITHIN)))
    return title, device, str(len(some)), *shares, *ranks


def _assumed() -> Iterator[str]:
    yield from (f"- {line}\n" for line in REMARKS["unseen"])
    yield "- of NVIDIA's containers what `tools/published/sources.toml` says source by source\n"
    for source in unseen_sources():
        if source not in sources():
            yield from (f"- {source.title}: {line}\n" for line in source.assumed)


def _rows() -> Table:
    rows = []
    for source, some in unseen_sources().items():
        for each in some:
            run = each.case.run
            sizes = f"{run.grad_accum} x {run.device_batch} x {run.recipe.seq_len}"
            shape = (each.case.name, each.case.row["model_family"], str(run.layout.devices), ways(run.layout), sizes)
            seconds = (f"{each.measured:.4g}", f"{each.seconds:.4g}", percent(each.error, sign=True))
            rows.append((source.title, *shape, *seconds))
    header = ("source", "row", "model", "devices", "layout", "batch x length", "measured s", "predicted s", "error %")
    return Table("unseen_rows", header, rows)


if __name__ == "__main__":
    page().write()

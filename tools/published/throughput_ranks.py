"""How well published layouts are ranked: the section of docs/published_throughput.md, and what its tests ask."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from throughput_case import CALIBRATED, TimeSource
from throughput_predictions import RANKS, PredictedCase, sources
from throughput_times import ranks_agree
from unseen_runs import Unseen, unseen

ENOUGH = 10  # rows, from which on a correlation says something


def ranked() -> list[tuple[TimeSource, list[PredictedCase]]]:
    """The sources with `ENOUGH` rows or more on one type of device."""
    split = [
        (source, [each for each in some if each.case.calibration == name])
        for source, some in sources().items()
        for name in CALIBRATED
    ]
    return [(source, some) for source, some in split if len(some) >= ENOUGH]


def layouts_of_one_model() -> Iterator[tuple[TimeSource, str, list[PredictedCase]]]:
    """The rows of a source that have one model in common and different layouts, ten or more."""
    for source, some in ranked():
        split: dict[str, list[PredictedCase]] = {}
        for each in some:
            spec = each.case.run.model
            model = f"{spec.n_layers} layers, width {spec.d_model}, {spec.attention.n_heads} heads"
            split.setdefault(model, []).append(each)
        for model, rows in split.items():
            ways = {(each.case.run.layout, each.case.run.device_batch) for each in rows}
            if len(rows) >= ENOUGH and len(ways) >= ENOUGH:
                yield source, model, rows


def agreement(some: Sequence[PredictedCase | Unseen]) -> float:
    """Spearman's correlation of predicted and measured seconds of a step."""
    return ranks_agree([each.seconds for each in some], [each.measured for each in some])


def unseen_of(source: TimeSource) -> list[Unseen]:
    """The rows of a source that nothing was fitted on."""
    return [each for each in unseen() if each.case.source == source]


def ceiling(some: Sequence[PredictedCase], rows: Sequence[str]) -> float:
    """The correlation if all but the named rows were predicted as they were measured."""
    exact = [each.seconds if each.case.name in rows else each.measured for each in some]
    return ranks_agree(exact, [each.measured for each in some])


# Rows that stand out among their neighbours in the source itself, and how.
RANK_REASONS = {
    "BigScience 176B trials, A100": (
        ("R0321", "R0326", "R0347", "R0373"),
        "times are those of one step, the second, which the page says can fluctuate, and four stand out there: "
        "1,568 sequences that take as long as 2,048 (R0326 and R0327; over twelve stages they take 18 % less than "
        "over six: B054), a micro-batch of one sequence that takes 43 % longer than one of two (R0347 and R0348), "
        "104 and 112 heads that take 14 to 18 % longer than 64 and than 128 (R0373 and R0372, R0374; R0321 and "
        "R0322). Besides, PCI Express and NUMA settings of nodes were improved on 02-25, by 1 to 5 % says the page,"
        " after R0321 to R0325; what was run before and after took 4 to 5 % less afterwards, while both are predicted "
        "alike. "
        "With the spread of what was run twice (2.5 %) and those four, a prediction without any error would reach "
        "0.92",
    ),
    "BigScience 1.3B, V100": (
        ("R0400", "R0405"),
        "times are printed in whole seconds; over two tensor ranks the step is far slower than the links of a node "
        "explain",
    ),
}


LAYOUT_REASONS = (
    "Such layouts often lie within a few percent of each other, so that single rows decide: among BigScience's R0326, "
    "whose time is that of a batch a third larger. vTrain's 39B took now more, now less than predicted in the same "
    "layout: 4 tensor ranks over 8 stages with 2, 3 and 4 sequences in a micro-batch were predicted 8 to 12 % too "
    "short, "
    "with 6 and 12 8 to 10 % too long, over 16 stages the other way round (before there was a `network_share`, as what "
    "follows)."
)


def ranks() -> Iterator[str]:
    yield "Spearman's correlation of predicted and measured seconds of a step, of sources with ten rows or more "
    yield "on one type of device; `unseen` are rows of the same source that are not in `runs.csv` and that nothing was "
    yield "fitted on (docs/unseen_throughput.md):\n\n"
    yield "| source | rows | correlation | unseen | correlation | all together |\n|---|--:|--:|--:|--:|--:|\n"
    low = []
    for source, some in ranked():
        found, others = agreement(some), unseen_of(source)
        cells = ["", "", ""]
        if len(others) >= ENOUGH:
            cells = [str(len(others)), f"{agreement(others):.3f}", f"{agreement([*some, *others]):.3f}"]
        yield f"| {source.title} | {len(some)} | {found:.3f} | {' | '.join(cells)} |\n"
        if found < RANKS:
            rows, why = RANK_REASONS[source.title]
            without = agreement([each for each in some if each.case.name not in rows])
            low.append(
                f"- {source.title}: {why}. Without {', '.join(rows)} it is {without:.3f}; with them unchanged and all "
                f"others predicted exactly it would be {ceiling(some, rows):.3f}.\n"
            )
    if low:
        yield f"\nBelow {RANKS} in the rows of `runs.csv`:\n\n"
        yield from low
    yield "\nOf one model alone, where nothing but the layout and the micro-batch differ in ten rows or more:\n\n"
    yield "| source | model | rows | correlation |\n|---|---|--:|--:|\n"
    for source, model, some in layouts_of_one_model():
        yield f"| {source.title} | {model} | {len(some)} | {agreement(some):.3f} |\n"
    yield f"\n{LAYOUT_REASONS}\n"

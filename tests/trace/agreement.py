"""What the closed form and the trace of one run, or two ledgers of one step, must agree in."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import groupby

from hypothesis import HealthCheck, Phase, settings

from trainledger.ledger.entry import CATEGORIES, Entry
from trainledger.ledger.ledger import Ledger
from trainledger.ledger.memory.timeline import peak_host_nbytes, timeline
from trainledger.ledger.step import account
from trainledger.observe.measure.step import rehearse
from trainledger.spec.layers import rotary_modules, windows_of
from trainledger.spec.rules.run import run_problems
from trainledger.spec.run import Run


def assert_agree(
    run: Run,
    predicted: Ledger | None = None,
    traced: Ledger | None = None,
    *,
    in_order: bool = True,
    within_nbytes: int | None = None,
) -> tuple[Ledger, Ledger]:
    """Closed form and trace agree in every total, at the peak and in each operation, as integers; gives both.

    ``in_order``, each operation is compared with the one at its place, and so are the live bytes while it runs, within
    the bytes that a loop followed once cannot place (`shared_nbytes`, or ``within_nbytes``); else as a whole.
    """
    assert [str(each) for each in run_problems(run)] == []
    predicted = account(run) if predicted is None else predicted
    traced = rehearse(run) if traced is None else traced
    loose = shared_nbytes(run) if within_nbytes is None else within_nbytes
    same_totals(predicted, traced)
    ours, theirs = [facts(each) for each in unrolled(predicted)], [facts(each) for each in unrolled(traced)]
    if in_order:
        for at, (mine, other) in enumerate(zip(ours, theirs, strict=False)):
            assert mine == other, at
        assert len(ours) == len(theirs)
        live = list(zip(live_nbytes(predicted), live_nbytes(traced), strict=True))
        for at, (mine_nbytes, other_nbytes) in enumerate(live):
            assert abs(mine_nbytes - other_nbytes) <= loose, (at, mine_nbytes, other_nbytes)
        assert abs(live[-1][0] - live[-1][1]) <= 8
    else:
        assert Counter(ours) == Counter(theirs)
    same_peak(predicted, traced, loose)
    return predicted, traced


def same_totals(predicted: Ledger, traced: Ledger) -> None:
    assert traced.uncounted == ()
    assert predicted.parameters == traced.parameters
    assert predicted.tokens == traced.tokens
    assert predicted.matmul_flops == traced.matmul_flops
    assert predicted.by("kind").get("attention") == traced.by("kind").get("attention")
    assert predicted.model_flops == traced.model_flops
    assert predicted.kept_nbytes == traced.kept_nbytes
    assert dict(predicted.resident) == dict(traced.resident)
    assert peak_host_nbytes(predicted) == peak_host_nbytes(traced)


def same_peak(predicted: Ledger, traced: Ledger, loose: int = 0) -> None:
    """Within 1 %, or the bytes that a loop cannot place; of the same moment also by category."""
    mine, theirs = predicted.peak(), traced.peak()
    within = max(0.01 * theirs.nbytes, loose)
    assert abs(mine.nbytes - theirs.nbytes) <= within
    if (mine.entry.name, mine.entry.phase) != (theirs.entry.name, theirs.entry.phase):
        return  # two moments that are as high within the tolerance, made of different things
    as_high = [each for each in timeline(traced) if each.nbytes >= theirs.nbytes - within]
    assert any(
        each.entry.name == mine.entry.name
        and all(abs(mine.by_category.get(name, 0) - each.live.get(name, 0)) <= within for name in CATEGORIES)
        for each in as_high
    ), (mine.by_category, theirs.by_category)


def facts(each: Entry) -> tuple[object, ...]:
    """An operation as it is compared: all but what frees it."""
    path = ".".join("*" if part.isdigit() else part for part in each.path.split("."))
    amounts = (each.flops, each.model_flops, each.read, each.written, each.kept, tuple(sorted(each.allocated)))
    return each.name, path, each.phase, each.kind, each.dtype, each.shape, each.basis, *amounts


def unrolled(ledger: Ledger) -> list[Entry]:
    """The operations of a step, each loop written out; what is freed after a loop joins the loop's last operation."""
    entries: list[Entry] = []
    for each in _written_out(ledger.entries, 0):
        if each.name == "release":
            entries[-1] = replace(entries[-1], freed=_added(entries[-1].freed, each.freed))
        else:
            entries.append(each)
    return entries


def _written_out(entries: Sequence[Entry], depth: int) -> Iterator[Entry]:
    for loop, group in groupby(entries, key=lambda each: each.loop[depth : depth + 1]):
        body = list(group)
        for _ in range(loop[0][1] if loop else 1):
            yield from _written_out(body, depth + 1) if loop else body


def _added(*amounts: Sequence[tuple[str, int]]) -> tuple[tuple[str, int], ...]:
    total: dict[str, int] = {}
    for category, nbytes in (pair for each in amounts for pair in each):
        total[category] = total.get(category, 0) + nbytes
    return tuple(total.items())


def live_nbytes(ledger: Ledger) -> list[int]:
    """The live bytes while each operation of the unrolled step runs, and last those after it."""
    live, history = sum(nbytes for _, nbytes in ledger.resident), []
    for each in unrolled(ledger):
        live += sum(nbytes for _, nbytes in each.allocated)
        history.append(live)
        live -= sum(nbytes for _, nbytes in each.freed)
    return [*history, live]


def shared_nbytes(run: Run) -> int:
    """Live bytes that a loop followed once cannot place to the operation.

    All layers read the same rotary angles (in low precision; in fp32 they are the model's buffers) and masks, which
    the first layer's backward frees a little before its end. So do two scalars while micro-batches add up their losses.
    """
    spec, recipe = run.model, run.recipe
    low = recipe.precision.low
    pairs = sum(own.rotary_size // 2 for own in rotary_modules(spec).values())
    angles = 2 * 2 * recipe.seq_len * pairs if low else 0
    per_mask = (spec.attention.n_heads if spec.positions.kind == "alibi" else 1) * recipe.seq_len**2 * (2 if low else 4)
    needed = (
        recipe.attention == "math"
        or recipe.attention_dropout > 0
        or spec.positions.kind == "alibi"
        or spec.attention.window
        or recipe.documents is not None
    )
    if recipe.documents is not None:  # each sequence has its own
        per_mask *= run.device_batch
    masks = per_mask * len(windows_of(spec)) if needed else 0
    return angles + masks + (8 if run.grad_accum > 1 else 0)


def examples(count: int) -> settings:
    """So many examples of a property, which are not shrunk: each takes a trace."""
    return settings(
        max_examples=count,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        phases=(Phase.explicit, Phase.reuse, Phase.generate),
    )
